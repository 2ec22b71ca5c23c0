"""Loops over columns: rounding to integers in a sweep or a descent, and errors of groups.

Plain torch takes several operations for each column; here some columns take one call, of C++ on the CPU and of a Triton
program on a GPU. Rows do not depend on each other, and threads divide them. Sums are those of plain torch but for the
last bits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.native import gpu_columns
from compress.native.library import Columns, Groups, library, pointer

MOST = 256  # columns of a call


@dataclass(frozen=True)
class Integers:
    """Codes from lowest to highest: code = clamp(round(w / scale + zero)), of value (code - zero) * scale.

    scale: [columns, rows] float32, or [rows] for all columns. zero: like scale, or None.
    """

    lowest: int
    highest: int
    scale: Tensor
    zero: Tensor | None = None


@dataclass(frozen=True)
class Rounded:
    """Columns that were rounded, [columns, rows] each.

    codes: in float32. values: of the codes. moves: what the state (of a sweep), or the value (of a descent), changed
    by. wanted: what was rounded, if it was asked for.
    """

    codes: Tensor
    values: Tensor
    moves: Tensor
    wanted: Tensor | None


def usable(tensor: Tensor) -> bool:
    """Whether the library or the programs take tensors like this one: float32 on its device, without a gradient."""
    if tensor.dtype != torch.float32 or tensor.requires_grad:
        return False
    return gpu_columns.usable(tensor) or (tensor.device.type == "cpu" and library() is not None)


def sweep(
    state: Float[Tensor, "columns rows"],
    matrix: Float[Tensor, "columns columns"],
    grid: Integers,
    keep: Bool[Tensor, "columns rows"] | None = None,
    wanted: bool = False,
) -> Rounded:
    """Round every column and subtract matrix[i, j] times its error from the columns j behind it; state stays as it is.

    keep: False: the weight is rounded as zero. wanted: return what was rounded, too.
    """
    return _rounded(state, matrix, grid, keep, None, None, wanted)


def descend(
    slope: Float[Tensor, "columns rows"],
    old: Float[Tensor, "columns rows"],
    matrix: Float[Tensor, "columns columns"],
    pivots: Float[Tensor, " columns"],
    grid: Integers,
    keep: Bool[Tensor, "columns rows"] | None = None,
) -> Rounded:
    """Round old + slope / pivots of every column, and subtract matrix[i, j] times its step from later slopes."""
    return _rounded(slope, matrix, grid, keep, old, pivots, False)


def group_sums(
    weight: Float[Tensor, "rows groups size"],
    importance: Float[Tensor, "groups size"],
    grid: Integers,
    summed: bool,
) -> list[Tensor]:
    """For each group the sum of h (value - w)^2, and, if `summed`, of h L^2 and h L w, with L = code - zero.

    h: the importance of a column. grid: its scale and zero are [rows, groups].
    """
    weight, importance = weight.contiguous(), importance.contiguous()
    scale, zero = grid.scale.contiguous(), None if grid.zero is None else grid.zero.contiguous()
    found = [torch.empty_like(scale) for _ in range(3 if summed else 1)]
    rows, groups, size = weight.shape
    assert importance.shape == (groups, size) and scale.shape == (rows, groups)
    assert zero is None or zero.shape == scale.shape
    if gpu_columns.usable(weight):
        gpu_columns.sum_groups(weight, importance, scale, zero, (grid.lowest, grid.highest), found)
        return found
    more = {"squares": pointer(found[1]), "products": pointer(found[2])} if summed else {}
    _call(
        "compress_sum_groups",
        Groups(
            weights=pointer(weight),
            scale=pointer(scale),
            zero=pointer(zero),
            importance=pointer(importance),
            error=pointer(found[0]),
            rows=rows,
            groups=groups,
            size=size,
            lowest=grid.lowest,
            highest=grid.highest,
            threads=torch.get_num_threads(),
            **more,
        ),
    )
    return found


def _rounded(
    state: Tensor,
    matrix: Tensor,
    grid: Integers,
    keep: Tensor | None,
    old: Tensor | None,
    pivots: Tensor | None,
    wanted: bool,
) -> Rounded:
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    state, scale = state.contiguous(), grid.scale.contiguous()
    zero, keep, old, pivots = (None if t is None else t.contiguous() for t in (grid.zero, keep, old, pivots))
    count, rows = state.shape
    like = (scale, zero) if scale.dim() == 2 else ()
    assert all(t is None or t.shape == state.shape for t in (keep, old, *like)) and matrix.shape == (count, count)
    codes, values, moves = (torch.empty_like(state) for _ in range(3))
    found = Rounded(codes, values, moves, torch.empty_like(state) if wanted else None)
    if gpu_columns.usable(state):
        limits = grid.lowest, grid.highest
        gpu_columns.round_columns(
            state, matrix, scale, zero, keep, old, pivots, limits, codes, values, moves, found.wanted
        )
        return found
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
            codes=pointer(found.codes),
            values=pointer(found.values),
            moves=pointer(found.moves),
            wanted=pointer(found.wanted),
            rows=rows,
            columns=count,
            scale_stride=rows if like else 0,
            matrix_stride=max(matrix.stride(0), count),
            lowest=grid.lowest,
            highest=grid.highest,
            threads=torch.get_num_threads(),
        ),
    )
    return found


def _call(name: str, structure: ctypes.Structure) -> None:
    """Call a function of the library with a pointer to a structure."""
    native = library()
    assert native is not None and getattr(native, name)(ctypes.addressof(structure)) == 0, "sizes do not fit together"
