"""`mxfp8-quantized`, the layout of compressed-tensors for MXFP8 weights (OCP Microscaling formats 1.0).

    <m>.weight         float8_e4m3fn [O, I]
    <m>.weight_scale   uint8 [O, I/32]        exponents e; the scale of 32 columns is 2^(e - 127)

W ~ weight * 2^(e - 127). bfloat16 represents it exactly, so every reader computes the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.checkpoint.formats.accepted import only
from compress.checkpoint.formats.layouts.block_floats import BlockFloats
from compress.checkpoint.formats.layouts.layout import FLOATS, codes_of
from compress.layers.base import TensorSpec
from compress.layers.parts.codes import CodesPart
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.bits import pack
from compress.numerics.quant.grids import GRIDS

GRID = GRIDS["mxfp8"]


class MXFP8Quantized(BlockFloats):
    """The `mxfp8-quantized` layout."""

    name = "mxfp8-quantized"
    grid = GRID
    strategy = "group"
    strategies = (strategy,)
    states = FLOATS | {"num_bits": only(8)}
    scale_dtype = "torch.uint8"

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec(scheme.shape, torch.float8_e4m3fn), "weight_scale": self.scales(scheme)}

    def encode(self, part: CodesPart) -> dict[str, Tensor]:
        return {"weight": part.codes().codes.view(torch.float8_e4m3fn), "weight_scale": part.scale}

    def decode(self, tensors: Mapping[str, Tensor], scheme: LayerScheme) -> CodesPart:
        words = pack(tensors["weight"].view(torch.uint8).to(torch.int16), GRID.bits)
        return CodesPart(codes_of(scheme), scheme.shape, {"words": words, "scale": tensors["weight_scale"]})
