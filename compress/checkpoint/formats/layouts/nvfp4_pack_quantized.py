"""`nvfp4-pack-quantized`, the layout of compressed-tensors for NVFP4 weights.

    <m>.weight_packed         uint8 [O, I/2]            E2M1 codes as in `fp4_pack`
    <m>.weight_scale          float8_e4m3fn [O, I/16]   one per 16 columns
    <m>.weight_global_scale   float32 [1]               a divisor: 448 * 6 / the largest magnitude

W ~ E2M1(code) * weight_scale / weight_global_scale. Servers fuse layers with the same input (q, k, v; gate, up) and
use one global scale for all of them, so these layers are written with a common global scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.checkpoint.formats.layouts.fp4_pack import Float4Layout, as_bytes, as_words
from compress.checkpoint.formats.layouts.layout import codes_of
from compress.layers.base import TensorSpec
from compress.layers.parts.codes import CodesPart
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.grids import GRIDS


class NVFP4PackQuantized(Float4Layout):
    """The `nvfp4-pack-quantized` layout."""

    name = "nvfp4-pack-quantized"
    grid = GRIDS["nvfp4"]
    strategy = "tensor_group"
    strategies = (strategy,)
    scale_dtype = "torch.float8_e4m3fn"

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        return super().tensors(scheme) | {"weight_global_scale": TensorSpec((1,), torch.float32)}

    def encode(self, part: CodesPart) -> dict[str, Tensor]:
        assert part.shared is not None
        return {
            "weight_packed": as_bytes(part.words),
            "weight_scale": part.scale.view(torch.float8_e4m3fn),
            "weight_global_scale": part.shared,
        }

    def decode(self, tensors: Mapping[str, Tensor], scheme: LayerScheme) -> CodesPart:
        fields = {
            "words": as_words(tensors["weight_packed"]),
            "scale": tensors["weight_scale"].view(torch.uint8),
            "shared": tensors["weight_global_scale"],
        }
        return CodesPart(codes_of(scheme), scheme.shape, fields)
