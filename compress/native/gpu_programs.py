# type: ignore - the language of Triton, in which tensors and constants have no types of Python
"""Triton programs for columns on the GPU. `gpu_columns` chooses their tiles and calls them.

Rows of a weight do not depend on each other: a program takes some rows through all columns of a call. Tensors are
transposed, [columns, rows], so that neighbouring threads have neighbouring rows. The programs are compiled without
contraction of products and sums; fused multiply-adds are written as `fma`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def code_of(target, scale, zero, lowest, highest, zeros: tl.constexpr):
    """Return clamp(round(target / scale + zero)) with ties to even; NaN stays NaN."""
    ratio = tl.div_rn(target, scale)
    if zeros:
        ratio += zero
    code = tl.minimum(tl.maximum(ratio, lowest), highest)
    code = (code + 12582912.0) - 12582912.0  # 1.5 * 2^23: a float of this size has no fraction
    return tl.where(ratio == ratio, code, ratio)


@triton.jit
def column(tile, indexes, index: tl.constexpr):
    """Return the column of a tile [columns, rows] with this index."""
    return tl.sum(tl.where((indexes == index)[:, None], tile, 0.0), axis=0)


@triton.jit
def with_column(tile, indexes, index: tl.constexpr, values):
    """Replace the column of a tile [columns, rows] with this index."""
    return tl.where((indexes == index)[:, None], values[None, :], tile)


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
    targets,
    rows,
    columns,
    scale_stride,
    matrix_stride,
    lowest,
    highest,
    zeros: tl.constexpr,
    masked: tl.constexpr,
    descent: tl.constexpr,
    with_targets: tl.constexpr,
    leaf: tl.constexpr,
    span: tl.constexpr,
    block: tl.constexpr,
):
    """Round the columns of some rows one after the other, a leaf of them in registers.

    Without `descent`: round the state, and subtract its change from later columns. With it: round old + state / pivots,
    and
    subtract the step from old. The moves of earlier leaves are read back from memory, after a barrier.
    """
    r = tl.program_id(0) * block + tl.arange(0, block)
    k = tl.arange(0, leaf)
    inside = (r < rows)[None, :]
    for start in range(0, columns, leaf):
        column_index = start + k
        is_inside = (column_index < columns)[:, None] & inside
        positions = column_index[:, None] * rows + r[None, :]
        grid = column_index[:, None] * scale_stride + r[None, :]
        current = tl.load(state + positions, mask=is_inside, other=0.0)
        for span_start in range(0, start, span):
            earlier = span_start + tl.arange(0, span)
            rates = tl.load(
                matrix + earlier[None, :] * matrix_stride + column_index[:, None],
                mask=(earlier < start)[None, :] & (column_index < columns)[:, None],
                other=0.0,
            )
            steps = tl.load(
                moves + earlier[:, None] * rows + r[None, :], mask=(earlier < start)[:, None] & inside, other=0.0
            )
            current -= tl.dot(rates, steps, input_precision="ieee")
        size = tl.load(scale + grid, mask=is_inside, other=1.0)
        shift = tl.load(zero + grid, mask=is_inside, other=0.0) if zeros else tl.zeros([leaf, block], tl.float32)
        mask = tl.load(keep + positions, mask=is_inside, other=0).to(tl.float32) if masked else shift
        old_values = tl.load(old + positions, mask=is_inside, other=0.0) if descent else shift
        rounded, changes, target_columns = tl.zeros_like(current), tl.zeros_like(current), tl.zeros_like(current)
        for i in tl.static_range(leaf):
            row = tl.minimum(start + i, columns - 1)  # columns after the last are computed, and not stored
            step, shift_column, current_column = column(size, k, i), column(shift, k, i), column(current, k, i)
            target = current_column
            if descent:
                target = column(old_values, k, i) + tl.div_rn(current_column, tl.load(pivots + row))
            if masked:
                target *= column(mask, k, i)
            code = code_of(target, step, shift_column, lowest, highest, zeros)
            value = (code - shift_column) * step if zeros else code * step
            change = value - column(old_values, k, i) if descent else current_column - value
            rounded, changes = with_column(rounded, k, i, code), with_column(changes, k, i, change)
            if with_targets:
                target_columns = with_column(target_columns, k, i, target)
            rate = tl.load(matrix + row * matrix_stride + column_index, mask=column_index < columns, other=0.0)
            current = tl.fma(-rate[:, None], change[None, :], current)  # earlier columns of `now` are not read again
        tl.store(codes + positions, rounded, mask=is_inside)
        tl.store(values + positions, (rounded - shift) * size if zeros else rounded * size, mask=is_inside)
        tl.store(moves + positions, changes, mask=is_inside)
        if with_targets:
            tl.store(targets + positions, target_columns, mask=is_inside)
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
    with_sums: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    """Sum h (value - w)^2 over groups of weights [rows, groups, size]; `with_sums`: also h L^2 and h L w."""
    group_index = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = group_index < count
    step = tl.load(scale + group_index, mask=inside, other=1.0)[:, None]
    low = tl.load(zero + group_index, mask=inside, other=0.0)[:, None] if zeros else 0.0
    group = (group_index % groups) * size
    total = tl.zeros([tile, block], tl.float32)
    square, product = tl.zeros_like(total), tl.zeros_like(total)
    for start in range(0, size, block):
        k = start + tl.arange(0, block)
        is_inside = inside[:, None] & (k < size)[None, :]
        w = tl.load(weights + (group_index * size)[:, None] + k[None, :], mask=is_inside, other=0.0)
        h = tl.load(importance + group[:, None] + k[None, :], mask=is_inside, other=0.0)
        code = code_of(w, step, low, lowest, highest, zeros)
        level = tl.where(is_inside, code - low if zeros else code, 0.0)  # 0 / 0 where a scale is 0
        difference = level * step - w
        total = tl.fma(h * difference, difference, total)
        if with_sums:
            weighted = h * level
            square, product = tl.fma(weighted, level, square), tl.fma(weighted, w, product)
    tl.store(error + group_index, tl.sum(total, axis=1), mask=inside)
    if with_sums:
        tl.store(squares + group_index, tl.sum(square, axis=1), mask=inside)
        tl.store(products + group_index, tl.sum(product, axis=1), mask=inside)
