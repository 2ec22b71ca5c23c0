"""Calls of the Triton programs that round columns and compute errors of groups on a GPU."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.native.gpus import capability, installed

PROGRAMS = "compress.native.gpu_programs"
OLDEST = (8, 0)  # compute capability: that of the other Triton programs
DEVICE = "cuda"
"""The type of the devices whose tensors the programs take. Tests set "cpu" to run them in Triton's interpreter."""


@dataclass(frozen=True)
class ColumnTile:
    """Sizes of one program of `round_columns`, and its resources.

    Attributes:
        rows: rows of the weight, one per thread with 32 per warp.
        warps: warps of a program.
        leaf: columns that are rounded in registers, one after the other.
        span: earlier columns whose moves are subtracted from a leaf in one product.
    """

    rows: int
    warps: int
    leaf: int
    span: int


@dataclass(frozen=True)
class GroupTile:
    """Sizes of one program of `sum_groups`.

    Attributes:
        weights: weights of a program.
        columns: largest number of columns of a group that are loaded at once.
        warps: warps of a program.
    """

    weights: int
    columns: int
    warps: int


TILE = ColumnTile(rows=32, warps=1, leaf=16, span=32)
SUMS = GroupTile(weights=2048, columns=256, warps=4)
"""Chosen without a GPU: ptxas spills nothing (`tests/kernels/compile_columns.py`), but does with span=64."""


def usable(tensor: Tensor) -> bool:
    """Whether the programs support tensors on this tensor's device."""
    return tensor.device.type == DEVICE and installed() and capability(tensor.device) >= OLDEST


@cache
def programs() -> Any:
    """Return the module of the programs; triton is imported when the first of them is called."""
    return importlib.import_module(PROGRAMS)


def round_columns(
    state: Tensor,
    matrix: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    keep: Tensor | None,
    old: Tensor | None,
    pivots: Tensor | None,
    limits: tuple[int, int],
    codes: Tensor,
    values: Tensor,
    moves: Tensor,
    targets: Tensor | None,
) -> None:
    """Round the columns of `state`, [columns, rows], into the last four tensors; arguments as in `columns`.

    All tensors are contiguous, except that rows of the matrix may have a stride. keep is bool.

    Args:
        limits: the lowest and the highest code.
    """
    columns, rows = state.shape
    if not state.numel():
        return
    tile = TILE
    keep_bytes = None if keep is None else keep.view(torch.uint8)
    optional_tensors = (state if tensor is None else tensor for tensor in (zero, keep_bytes, old, pivots))
    with torch.cuda.device_of(state):  # where there are several GPUs
        programs().round_columns[(math.ceil(rows / tile.rows),)](
            state,
            matrix,
            scale,
            *optional_tensors,
            codes,
            values,
            moves,
            state if targets is None else targets,
            rows,
            columns,
            rows if scale.dim() == 2 else 0,
            matrix.stride(0),
            float(limits[0]),
            float(limits[1]),
            zeros=zero is not None,
            masked=keep is not None,
            descent=old is not None,
            with_targets=targets is not None,
            leaf=tile.leaf,
            span=tile.span,
            block=tile.rows,
            num_warps=tile.warps,
            num_stages=1,
            enable_fp_fusion=False,  # a value is rounded before it is subtracted, as in plain torch
        )


def sum_groups(
    weight: Tensor, importance: Tensor, scale: Tensor, zero: Tensor | None, limits: tuple[int, int], sums: list[Tensor]
) -> None:
    """Sum over groups of weight [rows, groups, size], into one or three tensors [rows, groups]; as in `columns`."""
    count, groups, size = scale.numel(), importance.shape[0], weight.shape[2]
    if not count:
        return
    columns = min(SUMS.columns, 1 << max(size - 1, 0).bit_length())
    tile = SUMS.weights // columns
    with torch.cuda.device_of(weight):
        programs().sum_groups[(math.ceil(count / tile),)](
            weight,
            importance,
            scale,
            scale if zero is None else zero,
            sums[0],
            sums[-1 if len(sums) == 1 else 1],
            sums[-1],
            count,
            groups,
            size,
            float(limits[0]),
            float(limits[1]),
            zeros=zero is not None,
            with_sums=len(sums) > 1,
            tile=tile,
            block=columns,
            num_warps=SUMS.warps,
            num_stages=1,
            enable_fp_fusion=False,
        )
