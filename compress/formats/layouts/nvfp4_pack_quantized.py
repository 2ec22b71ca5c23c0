"""`nvfp4-pack-quantized`, the layout of compressed-tensors for NVFP4 weights.

    <m>.weight_packed         uint8 [O, I/2]            E2M1 codes as in `fp4_pack`
    <m>.weight_scale          float8_e4m3fn [O, I/16]   one per 16 columns
    <m>.weight_global_scale   float32 [1]               a divisor: 448 * 6 / the largest magnitude

W ~ E2M1(code) * weight_scale / weight_global_scale. Servers fuse layers that read the same input (q, k, v; gate, up)
and then keep one global scale for all, so such layers are written with the same one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.formats.base import Scheme
from compress.formats.layouts.fp4_pack import Float4Layout, as_bytes, as_words
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.packed import PackedCodes


class NVFP4PackQuantized(Float4Layout):
    """The `nvfp4-pack-quantized` layout."""

    name = "nvfp4-pack-quantized"
    grid = GRIDS["nvfp4"]
    strategy = "tensor_group"
    scale_dtype = "torch.float8_e4m3fn"

    def encode(self, packed: PackedCodes) -> dict[str, Tensor]:
        assert packed.shared is not None
        return {
            "weight_packed": as_bytes(packed.words),
            "weight_scale": packed.scale.view(torch.float8_e4m3fn),
            "weight_global_scale": packed.shared,
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
        rows, half = tensors["weight_packed"].shape
        words, scale = as_words(tensors["weight_packed"]), tensors["weight_scale"].view(torch.uint8)
        shared = tensors["weight_global_scale"]
        return PackedCodes(words, scale, None, scheme.coded, scheme.group_size, (rows, 2 * half), shared=shared)
