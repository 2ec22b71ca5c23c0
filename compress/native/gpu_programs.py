# type: ignore - the language of Triton, in which tensors and constants have no types of Python
"""The programs for columns that run on the GPU, in Triton. `gpu_columns` chooses their tiles and calls them.

Rows of a weight do not depend on each other: a program takes some rows through all columns of a call. Tensors are
transposed, [columns, rows], so that neighbouring threads have neighbouring rows. They are compiled without contracting
products and sums; `fma` stands where it is meant.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def code_of(wanted, scale, zero, lowest, highest, zeros: tl.constexpr):
    """clamp(round(wanted / scale + zero)) to the nearest, ties to even; a NaN stays one."""
    ratio = tl.div_rn(wanted, scale)
    if zeros:
        ratio += zero
    code = tl.minimum(tl.maximum(ratio, lowest), highest)
    code = (code + 12582912.0) - 12582912.0  # 1.5 * 2^23: a float of this size has no fraction
    return tl.where(ratio == ratio, code, ratio)


@triton.jit
def column(tile, places, at: tl.constexpr):
    """Column number `at` of a tile [columns, rows]."""
    return tl.sum(tl.where((places == at)[:, None], tile, 0.0), axis=0)


@triton.jit
def with_column(tile, places, at: tl.constexpr, values):
    """A tile [columns, rows] with another column number `at`."""
    return tl.where((places == at)[:, None], values[None, :], tile)


@triton.jit(do_not_specialize=["rows", "scale_stride"])  # a thread then has one row, and all columns of a leaf
def round_columns(
    state,
    matrix,
    scale,
    zero,
    keep,
    old,
    pivots,
    codes,
    values,
    moves,
    wanted,
    rows,
    columns,
    scale_stride,
    matrix_stride,
    lowest,
    highest,
    zeros: tl.constexpr,
    kept: tl.constexpr,
    descent: tl.constexpr,
    asked: tl.constexpr,
    leaf: tl.constexpr,
    before: tl.constexpr,
    block: tl.constexpr,
):
    """Round the columns of some rows one after the other, a leaf of them in registers.

    sweep: round the state, and subtract its change from later columns. descent: round old + state / pivots, and
    subtract the step from old. The moves of earlier leaves are read back from memory, after a barrier.
    """
    r = tl.program_id(0) * block + tl.arange(0, block)
    k = tl.arange(0, leaf)
    inside = (r < rows)[None, :]
    for start in range(0, columns, leaf):
        place = start + k
        there = (place < columns)[:, None] & inside
        at = place[:, None] * rows + r[None, :]
        grid = place[:, None] * scale_stride + r[None, :]
        now = tl.load(state + at, mask=there, other=0.0)
        for first in range(0, start, before):
            b = first + tl.arange(0, before)
            rates = tl.load(
                matrix + b[None, :] * matrix_stride + place[:, None],
                mask=(b < start)[None, :] & (place < columns)[:, None],
                other=0.0,
            )
            steps = tl.load(moves + b[:, None] * rows + r[None, :], mask=(b < start)[:, None] & inside, other=0.0)
            now -= tl.dot(rates, steps, input_precision="ieee")
        size = tl.load(scale + grid, mask=there, other=1.0)
        shift = tl.load(zero + grid, mask=there, other=0.0) if zeros else tl.zeros([leaf, block], tl.float32)
        keeps = tl.load(keep + at, mask=there, other=0).to(tl.float32) if kept else shift
        last = tl.load(old + at, mask=there, other=0.0) if descent else shift
        rounded, changes, goals = tl.zeros_like(now), tl.zeros_like(now), tl.zeros_like(now)
        for i in tl.static_range(leaf):
            row = tl.minimum(start + i, columns - 1)  # columns after the last are computed, and not stored
            each, low, known = column(size, k, i), column(shift, k, i), column(now, k, i)
            goal = known
            if descent:
                goal = column(last, k, i) + tl.div_rn(known, tl.load(pivots + row))
            if kept:
                goal *= column(keeps, k, i)
            code = code_of(goal, each, low, lowest, highest, zeros)
            value = (code - low) * each if zeros else code * each
            change = value - column(last, k, i) if descent else known - value
            rounded, changes = with_column(rounded, k, i, code), with_column(changes, k, i, change)
            if asked:
                goals = with_column(goals, k, i, goal)
            rate = tl.load(matrix + row * matrix_stride + place, mask=place < columns, other=0.0)
            now = tl.fma(-rate[:, None], change[None, :], now)  # earlier columns of `now` are not read again
        tl.store(codes + at, rounded, mask=there)
        tl.store(values + at, (rounded - shift) * size if zeros else rounded * size, mask=there)
        tl.store(moves + at, changes, mask=there)
        if asked:
            tl.store(wanted + at, goals, mask=there)
        tl.debug_barrier()  # other threads of this program read these moves


@triton.jit
def sum_groups(
    weights,
    importance,
    scale,
    zero,
    error,
    squares,
    products,
    count,
    groups,
    size,
    lowest,
    highest,
    zeros: tl.constexpr,
    summed: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    """For some groups of weights [rows, groups, size] the sum of h (value - w)^2; `summed`: of h L^2 and h L w, too."""
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < count
    each = tl.load(scale + at, mask=inside, other=1.0)[:, None]
    low = tl.load(zero + at, mask=inside, other=0.0)[:, None] if zeros else 0.0
    group = (at % groups) * size
    total = tl.zeros([tile, block], tl.float32)
    square, product = tl.zeros_like(total), tl.zeros_like(total)
    for start in range(0, size, block):
        k = start + tl.arange(0, block)
        there = inside[:, None] & (k < size)[None, :]
        w = tl.load(weights + (at * size)[:, None] + k[None, :], mask=there, other=0.0)
        h = tl.load(importance + group[:, None] + k[None, :], mask=there, other=0.0)
        code = code_of(w, each, low, lowest, highest, zeros)
        level = tl.where(there, code - low if zeros else code, 0.0)  # 0 / 0 where a scale is 0
        off = level * each - w
        total = tl.fma(h * off, off, total)
        if summed:
            weighted = h * level
            square, product = tl.fma(weighted, level, square), tl.fma(weighted, w, product)
    tl.store(error + at, tl.sum(total, axis=1), mask=inside)
    if summed:
        tl.store(squares + at, tl.sum(square, axis=1), mask=inside)
        tl.store(products + at, tl.sum(product, axis=1), mask=inside)
