"""Dense weights on the CPU as float32 or bfloat16 numbers, which are read where they are stored.

A product of few rows of inputs is limited by reading the weight, which plain torch reads in bfloat16 at a third of the
bandwidth or less. Float32 inputs times a bfloat16 weight need no float32 copy of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.kernels.contract import PartLike, RoundingLike
from compress.kernels.cpu.codes import TYPES, PackedKernel, linear
from compress.kernels.cpu.packed import UNIT, PackedCodes
from compress.kernels.recording import as_operators
from compress.native.library import LANES, available

FEW = {torch.float32: 8, torch.bfloat16: 2}
"""Rows of inputs up to which this kernel is faster than torch for weights in the dtype of the inputs."""
ROWS = {torch.float32: 13, torch.bfloat16: 14}  # compress_codec of compress_cpu.h


class DenseKernel(PackedKernel):
    """Dense float32 or bfloat16 weights times few inputs, and bfloat16 weights times float32 inputs."""

    def supports(self, part: PartLike, x: Tensor, rounding: RoundingLike | None) -> bool:
        if rounding is not None or part.kind != "dense" or x.dtype not in TYPES or not x.is_cpu:
            return False
        weight: Tensor = part.weight  # type: ignore[attr-defined]
        if weight.dtype not in ROWS or not weight.is_cpu or not weight.is_contiguous() or weight.dim() != 2:
            return False
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return False
        if weight.dtype is torch.bfloat16 and x.dtype is torch.float32:
            return available()
        return x.numel() <= FEW[x.dtype] * part.shape[1] and available()

    def prepare(self, part: PartLike) -> PackedCodes:
        return wrapped(part)

    def product(
        self, x: Tensor, part: Any, prepared: PackedCodes, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        if not as_operators() and prepared.words.data_ptr() != part.weight.data_ptr():  # `.data` was replaced
            part.forget_prepared()
            prepared = part.prepared(self)
        return linear(x, prepared, bias)


def wrapped(part: Any) -> PackedCodes:
    """Describe the weight of a part to the kernels; it is shared, not copied."""
    return packed_rows(part.weight.detach(), part.narrow_inputs)


def packed_rows(weight: Tensor, narrow: bool = False) -> PackedCodes:
    """Describe a contiguous float32 or bfloat16 weight [out, in] to the kernels.

    Args:
        weight: the weight.
        narrow: see `PackedCodes`.
    """
    (rows, width), scale = weight.shape, torch.ones(-(-weight.shape[0] // LANES), 1, LANES)
    columns = -(-width // UNIT) * UNIT
    return PackedCodes(
        weight, scale, None, None, None, None, None, 0.0, ROWS[weight.dtype], rows, width, columns, narrow
    )


KERNEL = DenseKernel()
