"""Loops over columns: rounding to integers or levels in a sweep or a descent, and errors of groups.

Plain torch takes several operations for each column; here one call processes several columns, in C++ on the CPU and in
a Triton program on a GPU. Rows do not depend on each other, and threads divide them. Sums equal those of plain torch
except for the last bits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.native import gpu_columns
from compress.native.library import Columns, Groups, check_status, library, pointer

MAX_COLUMNS = 256  # columns of a call


@dataclass(frozen=True)
class ScaledGrid:
    """The numbers to which columns are rounded: integers with scales and zero points, or levels with scales.

    An integer code is clamp(round(w / scale + zero)), with the value (code - zero) * scale. The code of a level is the
    index of the one nearest to w / scale, with the value level * scale.

    Attributes:
        limits: the smallest and the largest code of integers; without effect if there are levels.
        scale: [columns, rows] float32, or [rows] for all columns.
        zero: zero points of integers in the shape of `scale`, or None.
        levels: ascending levels, or None.
    """

    limits: tuple[int, int]
    scale: Tensor
    zero: Tensor | None = None
    levels: tuple[float, ...] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a structure of the library; the table of levels lives as long as the structure."""
        table = None if self.levels is None else (ctypes.c_float * len(self.levels))(*self.levels)
        return {
            "levels": None if table is None else ctypes.cast(table, ctypes.c_void_p),
            "entries": len(self.levels or ()),
            "lowest": self.limits[0],
            "highest": self.limits[1],
        }


@dataclass(frozen=True)
class RoundedColumns:
    """Columns that were rounded, [columns, rows] each.

    Attributes:
        codes: codes in float32.
        values: dequantized codes.
        moves: change of the state (of a sweep) or of the value (of a descent).
        targets: values before rounding, if requested.
    """

    codes: Tensor
    values: Tensor
    moves: Tensor
    targets: Tensor | None


def usable(tensor: Tensor, grid: ScaledGrid | None) -> bool:
    """Whether the library or the GPU programs round a tensor like this one: float32, without a gradient.

    Args:
        tensor: the weight.
        grid: the numbers to which it is rounded; None if the loops lack their rule. The GPU programs have no levels.
    """
    if grid is None or tensor.dtype != torch.float32 or tensor.requires_grad:
        return False
    if tensor.device.type == "cpu" and library() is not None:
        return True
    return grid.levels is None and gpu_columns.usable(tensor)


def sweep(
    state: Float[Tensor, "columns rows"],
    matrix: Float[Tensor, "columns columns"],
    grid: ScaledGrid,
    keep: Bool[Tensor, "columns rows"] | None = None,
    with_targets: bool = False,
) -> RoundedColumns:
    """Round every column and subtract matrix[i, j] times its error from the columns j after it.

    Args:
        state: the columns; not modified.
        matrix: ratios of the compensation.
        grid: numbers and scales.
        keep: False where a weight is rounded to zero.
        with_targets: whether to return the values before rounding.
    """
    return _rounded(state, matrix, grid, keep, None, None, with_targets)


def descend(
    slope: Float[Tensor, "columns rows"],
    old: Float[Tensor, "columns rows"],
    matrix: Float[Tensor, "columns columns"],
    pivots: Float[Tensor, " columns"],
    grid: ScaledGrid,
    keep: Bool[Tensor, "columns rows"] | None = None,
) -> RoundedColumns:
    """Round old + slope / pivots of every column, and subtract matrix[i, j] times its step from later slopes."""
    return _rounded(slope, matrix, grid, keep, old, pivots, False)


def group_sums(
    weight: Float[Tensor, "rows groups size"],
    importance: Float[Tensor, "groups size"],
    grid: ScaledGrid,
    with_sums: bool,
) -> list[Tensor]:
    """Sum h (value - w)^2 over each group and, if requested, h L^2 and h L w, with L = code - zero, or the level.

    Args:
        weight: the weights w.
        importance: h, of each column.
        grid: numbers; scale and zero are [rows, groups].
        with_sums: whether to compute the second and third sums.
    """
    weight, importance = weight.contiguous(), importance.contiguous()
    scale, zero = grid.scale.contiguous(), None if grid.zero is None else grid.zero.contiguous()
    sums = [torch.empty_like(scale) for _ in range(3 if with_sums else 1)]
    rows, groups, size = weight.shape
    if (
        importance.shape != (groups, size)
        or scale.shape != (rows, groups)
        or (zero is not None and zero.shape != scale.shape)
    ):
        raise ValueError(f"importance or scales do not fit weights [{rows}, {groups}, {size}]")
    if grid.levels is None and gpu_columns.usable(weight):
        gpu_columns.sum_groups(weight, importance, scale, zero, grid.limits, sums)
        return sums
    outputs = {"squares": pointer(sums[1]), "products": pointer(sums[2])} if with_sums else {}
    _call(
        "compress_sum_groups",
        Groups(
            weights=pointer(weight),
            scale=pointer(scale),
            zero=pointer(zero),
            importance=pointer(importance),
            error=pointer(sums[0]),
            rows=rows,
            groups=groups,
            size=size,
            threads=torch.get_num_threads(),
            **grid.fields,
            **outputs,
        ),
    )
    return sums


def _rounded(
    state: Tensor,
    matrix: Tensor,
    grid: ScaledGrid,
    keep: Tensor | None,
    old: Tensor | None,
    pivots: Tensor | None,
    with_targets: bool,
) -> RoundedColumns:
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    state, scale = state.contiguous(), grid.scale.contiguous()
    zero, keep, old, pivots = (None if t is None else t.contiguous() for t in (grid.zero, keep, old, pivots))
    count, rows = state.shape
    per_column = (scale, zero) if scale.dim() == 2 else ()
    if any(t is not None and t.shape != state.shape for t in (keep, old, *per_column)) or matrix.shape != (
        count,
        count,
    ):
        raise ValueError(f"masks, scales or the matrix do not fit weights {list(state.shape)}")
    codes, values, moves = (torch.empty_like(state) for _ in range(3))
    rounded = RoundedColumns(codes, values, moves, torch.empty_like(state) if with_targets else None)
    if grid.levels is None and gpu_columns.usable(state):
        gpu_columns.round_columns(
            state, matrix, scale, zero, keep, old, pivots, grid.limits, codes, values, moves, rounded.targets
        )
        return rounded
    _call(
        "compress_round_columns",
        Columns(
            state=pointer(state),
            matrix=pointer(matrix),
            scale=pointer(scale),
            zero=pointer(zero),
            keep=pointer(keep),
            old=pointer(old),
            pivots=pointer(pivots),
            codes=pointer(rounded.codes),
            values=pointer(rounded.values),
            moves=pointer(rounded.moves),
            wanted=pointer(rounded.targets),
            rows=rows,
            columns=count,
            scale_stride=rows if per_column else 0,
            matrix_stride=max(matrix.stride(0), count),
            threads=torch.get_num_threads(),
            **grid.fields,
        ),
    )
    return rounded


def _call(name: str, structure: ctypes.Structure) -> None:
    """Call a function of the library with a pointer to a structure."""
    native = library()
    assert native is not None
    check_status(getattr(native, name)(ctypes.addressof(structure)), "sizes do not fit together")
