"""Codes: the one integer form of a quantized weight, from which every layout is written.

A weight [out, in] is shared out into groups of columns, each with its own scale (and zero point) per row:
`group_size` columns ('channel': all of them; 'tensor': all of them, and all rows share one scale). A width that
the group size does not divide ends with one short group. With `group_index` the groups need not be contiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.numerics.grids import Grid, IntGrid

GroupSize = int | Literal["channel", "tensor"]
ScaleSearch = Literal["absmax", "mse"]

MSE_NORM = 2.4  # GPTQ reference code (quant.py): the exponent of the clipping search
MSE_STEPS = 30  # shrink factors tried per group: 1.00, 0.98, ... 0.40 (the reference: 80 of step 0.01 down to 0.2)
MSE_SHRINK = 0.60  # the largest share of the range that is cut off


def groups_in(width: int, group_size: GroupSize) -> int:
    """How many groups a row of `width` columns has."""
    return math.ceil(width / group_size) if isinstance(group_size, int) else 1


@dataclass(frozen=True, eq=False)
class Codes:
    """A quantized weight.

    codes: [out, in], int8 for integer grids, uint8 otherwise. scale: [out, groups] ([1, 1] per tensor).
    zero: like scale, in the dtype of codes' range, or None. group_index: [in] int32 group of each column, only
    where groups are not contiguous.
    """

    codes: Int[Tensor, "out in"]
    scale: Float[Tensor, "out groups"]
    zero: Float[Tensor, "out groups"] | None
    grid: Grid
    group_size: GroupSize
    group_index: Int[Tensor, " in"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dense(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "out in"]:
        """The weight that the codes stand for: (code - zero) * scale, computed in `dtype`."""
        width = self.codes.shape[1]
        scale = spread(self.scale.to(dtype), width, self.group_size, self.group_index)
        zero = None if self.zero is None else spread(self.zero.to(dtype), width, self.group_size, self.group_index)
        return self.grid.decode(self.codes, scale, zero)


def spread(
    per_group: Float[Tensor, "out groups"],
    width: int,
    group_size: GroupSize,
    group_index: Int[Tensor, " in"] | None = None,
) -> Float[Tensor, "out in"]:
    """Values per group, repeated for every column of the group (or left to broadcast where there is one group)."""
    if group_index is not None:
        return per_group[:, group_index.long()]
    if per_group.shape[1] == 1 or not isinstance(group_size, int):
        return per_group
    return per_group.repeat_interleave(group_size, dim=1)[:, :width]


def grouped(weight: Float[Tensor, "out in"], group_size: GroupSize) -> Float[Tensor, "rows groups size"]:
    """The weight cut into its groups; a short last group is filled up with zeros, which change no range or error."""
    rows, width = weight.shape
    if group_size == "tensor":
        return weight.reshape(1, 1, -1)
    size = group_size if isinstance(group_size, int) else width
    missing = groups_in(width, group_size) * size - width
    if missing:
        weight = torch.nn.functional.pad(weight, (0, missing))
    return weight.reshape(rows, -1, size)


def fit(
    weight: Float[Tensor, "out in"],
    grid: Grid,
    group_size: GroupSize,
    symmetric: bool,
    search: ScaleSearch = "absmax",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero per group, [out, groups], the scale already rounded to `dtype`, its dtype when stored.

    search 'absmax' covers the whole range. 'mse' shrinks the range of each group to where the rounding error
    sum |w - Q(w)|^2.4 is smallest (GPTQ reference code, quant.py `find_params`).
    """
    parts = grouped(weight, group_size)
    low, high = torch.aminmax(parts, dim=-1)
    scale, zero = grid.fit(low, high, symmetric, dtype)
    if search == "absmax":
        return scale, zero
    best = torch.full_like(scale, math.inf)
    for step in range(MSE_STEPS + 1):
        share = 1 - MSE_SHRINK * step / MSE_STEPS
        tried, tried_zero = grid.fit(low * share, high * share, symmetric, dtype)
        error = _power_error(parts, grid, tried, tried_zero)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, tried, scale)
        if zero is not None and tried_zero is not None:
            zero = torch.where(better, tried_zero, zero)
    return scale, zero


def _power_error(parts: Tensor, grid: Grid, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Sum of |w - Q(w)|^MSE_NORM over each group."""
    scale, zero = scale[..., None], None if zero is None else zero[..., None]
    rounded = grid.decode(grid.encode(parts, scale, zero), scale, zero)
    return (rounded - parts).abs_().pow_(MSE_NORM).sum(-1)


def quantize(
    weight: Float[Tensor, "out in"],
    grid: Grid,
    group_size: GroupSize = "channel",
    symmetric: bool = True,
    search: ScaleSearch = "absmax",
    mask: Bool[Tensor, "out in"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Codes:
    """Round every weight to the nearest value of the grid. mask: True where a weight is kept; others become zero."""
    if mask is not None:
        weight = weight * mask
    scale, zero = fit(weight, grid, group_size, symmetric, search, dtype)
    width = weight.shape[1]
    codes = grid.encode(
        weight, spread(scale, width, group_size), None if zero is None else spread(zero, width, group_size)
    )
    return Codes(store(codes, grid), scale, zero, grid, group_size)


def store(codes: Tensor, grid: Grid) -> Tensor:
    """Codes in the integer dtype that `Codes` holds: int8 for integer grids, uint8 (index, bit pattern) otherwise."""
    return codes.to(torch.int8 if isinstance(grid, IntGrid) else torch.uint8)
