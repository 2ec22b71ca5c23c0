"""`float-quantized`, the 8-bit float layout of compressed-tensors (W8A8 with inputs rounded per token or by a static
scale, or W8A16).

    <m>.weight         float8_e4m3fn [O, I]
    <m>.weight_scale   float [O, 1] per channel; [1] per tensor; [ceil(O/R), I/C] per block of R x C weights
    <m>.input_scale    float [1]                 only with a static activation scale

Inputs that are rounded per token (and, with blocks of weights, per C columns) at run time need no tensors.
W ~ weight * scale.

The reader (transformers 5.23 with compressed-tensors 0.20) multiplies in the dtype of the scale. The class that it
registers under this name requires input arguments when the reader itself chooses a layout. A layout that the config
names is also read without them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats.accepted import only
from compress.checkpoint.formats.layouts.layout import FLOATS, Layout, codes_of
from compress.layers.base import TensorSpec
from compress.layers.parts.codes import CodesPart
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.codes import Codes, groups_in
from compress.numerics.quant.grids import GRIDS, SymmetricGrid

GRID = GRIDS["fp8_e4m3"]


class FloatQuantized(Layout):
    """The `float-quantized` layout."""

    name = "float-quantized"
    grid = GRID
    strategies = ("channel", "tensor", "block")
    states = FLOATS | {"num_bits": only(8)}

    def suits(self, scheme: LayerScheme) -> bool:
        codes = scheme.codes
        if codes is None or codes.grid.group_size is not None:
            return False
        return isinstance(codes.grid, SymmetricGrid) and codes.grid.bits == 8

    def refuses(self, scheme: LayerScheme) -> str | None:
        codes, rounding = codes_of(scheme), scheme.rounding
        if codes.grid is not GRID:
            return f"weights {codes.grid.name} have no reader; use {GRID.name}, or format: native"
        if isinstance(codes.group_size, int) and codes.rows == 1:
            return (
                f"{GRID.name} has no layout with groups; use group_size: channel or tensor, blocks "
                "(block_rows of rtn), or format: native"
            )
        if rounding is not None and rounding.grid is not GRID:
            return f"{GRID.name} weights need activations none or {GRID.name}; use one of these, or format: native"
        return None

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        codes, (rows, width) = codes_of(scheme), scheme.shape
        lines = math.ceil(rows / codes.rows)
        scales = (1,) if codes.group_size == "tensor" else (lines, groups_in(width, codes.group_size))
        return {"weight": TensorSpec(scheme.shape, torch.float8_e4m3fn), "weight_scale": TensorSpec(scales)}

    def encode(self, part: CodesPart) -> dict[str, Tensor]:
        if part.group_size == "tensor":
            scale = part.scale.reshape(1)
        else:
            scale = part.scale[:: min(part.scheme.rows, len(part.scale))].contiguous()
        return {"weight": part.codes().codes.view(torch.float8_e4m3fn), "weight_scale": scale}

    def decode(self, tensors: Mapping[str, Tensor], scheme: LayerScheme) -> CodesPart:
        scale, codes = tensors["weight_scale"], codes_of(scheme)
        scale = scale.reshape(1, 1) if codes.group_size == "tensor" else scale
        if codes.rows > 1:
            rows = scheme.shape[0]
            scale = scale.repeat_interleave(min(codes.rows, rows), dim=0)[:rows]
        bits = tensors["weight"].view(torch.uint8)
        return CodesPart.of(Codes(bits, scale, None, GRID, codes.group_size, rows=codes.rows))

    def weight_arguments(self, scheme: LayerScheme) -> dict[str, Any]:
        codes, arguments = codes_of(scheme), super().weight_arguments(scheme)
        if codes.rows == 1:
            return arguments
        return {**arguments, "strategy": "block", "group_size": None, "block_structure": [codes.rows, codes.group_size]}
