"""`mxfp4-pack-quantized`, the layout of compressed-tensors for MXFP4 weights (OCP Microscaling formats 1.0).

    <m>.weight_packed   uint8 [O, I/2]    E2M1 codes as in `fp4_pack`
    <m>.weight_scale    uint8 [O, I/32]   exponents e; the scale of 32 columns is 2^(e - 127)

W ~ E2M1(code) * 2^(e - 127). bfloat16 represents it exactly, so every reader computes the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from compress.checkpoint.formats.layouts.fp4_pack import Float4Layout, as_bytes, as_words
from compress.checkpoint.formats.layouts.layout import codes_of
from compress.layers.parts.codes import CodesPart
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.grids import GRIDS


class MXFP4PackQuantized(Float4Layout):
    """The `mxfp4-pack-quantized` layout."""

    name = "mxfp4-pack-quantized"
    grid = GRIDS["mxfp4"]
    strategy = "group"
    strategies = (strategy,)
    scale_dtype = "torch.uint8"

    def encode(self, part: CodesPart) -> dict[str, Tensor]:
        return {"weight_packed": as_bytes(part.words), "weight_scale": part.scale}

    def decode(self, tensors: Mapping[str, Tensor], scheme: LayerScheme) -> CodesPart:
        fields = {"words": as_words(tensors["weight_packed"]), "scale": tensors["weight_scale"]}
        return CodesPart(codes_of(scheme), scheme.shape, fields)
