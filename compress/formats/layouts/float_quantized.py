"""`float-quantized`, the 8-bit float layout of compressed-tensors (W8A8 with inputs rounded per token or by a static
scale, or W8A16).

    <m>.weight         float8_e4m3fn [O, I]
    <m>.weight_scale   float [O, 1] per channel; [1] per tensor
    <m>.input_scale    float [1]                 only with a static activation scale

Inputs that are rounded per token at run time need no tensors. W ~ weight * scale.

The reader (transformers 5.23 with compressed-tensors 0.20) multiplies in the dtype of the scale. The class that it
registers under this name requires input arguments when the reader itself chooses a layout. A layout that the config
names is also read without them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.formats.layouts.layout import Layout, codes_of
from compress.numerics.quant.codes import Codes
from compress.numerics.quant.grids import GRIDS, SymmetricGrid
from compress.weights.base import TensorSpec
from compress.weights.codes import CodesPart
from compress.weights.layer import LayerScheme

GRID = GRIDS["fp8_e4m3"]


class FloatQuantized(Layout):
    """The `float-quantized` layout."""

    name = "float-quantized"
    grid = GRID

    def suits(self, scheme: LayerScheme) -> bool:
        codes = scheme.codes
        return codes is not None and isinstance(codes.grid, SymmetricGrid) and codes.grid.bits == 8

    def refuses(self, scheme: LayerScheme) -> str | None:
        codes, rounding = codes_of(scheme), scheme.rounding
        if codes.grid is not GRID:
            return f"weights {codes.grid.name} have no reader; use {GRID.name}, or format: native"
        if isinstance(codes.group_size, int):
            return f"{GRID.name} has no layout with groups; use group_size: channel or tensor, or format: native"
        if rounding is not None and rounding.grid is not GRID:
            return f"{GRID.name} weights need activations none or {GRID.name}; use one of these, or format: native"
        return None

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        scales = (1,) if codes_of(scheme).group_size == "tensor" else (scheme.shape[0], 1)
        return {"weight": TensorSpec(scheme.shape, torch.float8_e4m3fn), "weight_scale": TensorSpec(scales)}

    def encode(self, part: CodesPart) -> dict[str, Tensor]:
        scale = part.scale.reshape(1) if part.group_size == "tensor" else part.scale
        return {"weight": part.codes().codes.view(torch.float8_e4m3fn), "weight_scale": scale}

    def decode(self, tensors: Mapping[str, Tensor], scheme: LayerScheme) -> CodesPart:
        scale, size = tensors["weight_scale"], codes_of(scheme).group_size
        scale = scale.reshape(1, 1) if size == "tensor" else scale
        return CodesPart.of(Codes(tensors["weight"].view(torch.uint8), scale, None, GRID, size))
