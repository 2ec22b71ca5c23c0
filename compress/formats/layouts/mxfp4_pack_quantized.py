"""`mxfp4-pack-quantized`, the layout of compressed-tensors for MXFP4 weights (OCP Microscaling formats 1.0).

    <m>.weight_packed   uint8 [O, I/2]    E2M1 codes as in `fp4_pack`
    <m>.weight_scale    uint8 [O, I/32]   exponents e; the scale of 32 columns is 2^(e - 127)

W ~ E2M1(code) * 2^(e - 127), which bfloat16 holds exactly, so that every reader has the very same weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from compress.formats.base import Scheme
from compress.formats.layouts.fp4_pack import Float4Layout, as_bytes, as_words
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.packed import PackedCodes


class MXFP4PackQuantized(Float4Layout):
    """The `mxfp4-pack-quantized` layout."""

    name = "mxfp4-pack-quantized"
    grid = GRIDS["mxfp4"]
    strategy = "group"
    scale_dtype = "torch.uint8"

    def encode(self, packed: PackedCodes) -> dict[str, Tensor]:
        return {"weight_packed": as_bytes(packed.words), "weight_scale": packed.scale}

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
        rows, half = tensors["weight_packed"].shape
        words = as_words(tensors["weight_packed"])
        return PackedCodes(words, tensors["weight_scale"], None, scheme.coded, scheme.group_size, (rows, 2 * half))
