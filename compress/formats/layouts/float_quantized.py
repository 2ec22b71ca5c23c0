"""`float-quantized`, the 8-bit float layout of compressed-tensors (W8A8 with inputs rounded per token, or W8A16).

    <m>.weight         float8_e4m3fn [O, I]
    <m>.weight_scale   float [O, 1] per channel; [1] per tensor

Inputs are rounded per token at run time, so they need no tensors. W ~ weight * scale.

Of the reader (transformers 5.23 with compressed-tensors 0.20): it multiplies in the dtype of the scale. The class
that it registers under this name asks for input arguments when it chooses a layout by itself, but a layout that the
config names is read without them too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.formats.base import Scheme
from compress.formats.layouts.layout import Layout
from compress.numerics.quant.codes import Codes
from compress.numerics.quant.grids import GRIDS, SymmetricGrid
from compress.numerics.quant.packed import PackedCodes

GRID = GRIDS["fp8_e4m3"]


class FloatQuantized(Layout):
    """The `float-quantized` layout."""

    name = "float-quantized"
    grid = GRID

    def suits(self, scheme: Scheme) -> bool:
        return isinstance(scheme.grid, SymmetricGrid) and scheme.grid.bits == 8

    def refuses(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        if scheme.grid is not GRID:
            return f"weights {scheme.coded.name} have no reader; use {GRID.name}, or format: native"
        if isinstance(scheme.group_size, int):
            return f"{GRID.name} has no layout for groups; use group_size: channel or tensor, or format: native"
        if scheme.activations not in (None, GRID):
            return f"{GRID.name} weights go with activations none or {GRID.name}, or format: native"
        return None

    def encode(self, packed: PackedCodes) -> dict[str, Tensor]:
        scale = packed.scale.reshape(1) if packed.group_size == "tensor" else packed.scale
        return {"weight": packed.codes().codes.view(torch.float8_e4m3fn), "weight_scale": scale}

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
        scale = tensors["weight_scale"]
        scale = scale.reshape(1, 1) if scheme.group_size == "tensor" else scale
        return PackedCodes.of(Codes(tensors["weight"].view(torch.uint8), scale, None, GRID, scheme.group_size))
