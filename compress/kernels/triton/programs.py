# type: ignore - the language of Triton, in which tensors and constants have no types of Python
"""The programs that run on the GPU, in Triton. `launch` chooses their tiles and calls them."""

from __future__ import annotations

import triton
import triton.language as tl

from compress.kernels.triton.decoding import (
    column,
    lift,
    lifted,
    numbers,
    paired,
    scale_at,
    spread,
    times_scale,
    turned,
    unit_scales,
    values_at,
    word_at,
)


@triton.jit
def inputs_at(x, m, at, there, x_row, whole: tl.constexpr, turn: tl.constexpr, per_unit: tl.constexpr):
    """Inputs [rows of x, columns] at some places of rows; zeros elsewhere. turn: in the order of `turned` columns."""
    if whole:
        some = tl.load(x + m[:, None] * x_row + at[None, :])
    else:
        some = tl.load(x + m[:, None] * x_row + at[None, :], mask=there[None, :], other=0.0)
    if turn:
        some = turned(some, False, per_unit)
    return some


@triton.jit
def added(found, parts, arrived, place, here, size):
    """(whether this program is the last one of its tile, the sums of all in their order); keeps the sums `found`.

    size: elements of a part.
    """
    count = tl.num_programs(1)
    tl.store(parts + tl.program_id(1) * size + place, found, mask=here)
    tl.debug_barrier()  # all threads have stored before one of them counts
    last = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == count - 1
    total = tl.zeros_like(found)
    if last:
        for one in range(count):
            total += tl.load(parts + one * size + place, mask=here, other=0, cache_modifier=".cg")
        tl.store(arrived + tl.program_id(0), 0)
    return last, total


@triton.jit
def finish(
    found,
    x_scale,
    bias,
    y,
    parts,
    arrived,
    m,
    n,
    place,
    here,
    size,
    rounded: tl.constexpr,
    split: tl.constexpr,
    biased: tl.constexpr,
):
    """Multiply by the scales of inputs, add what other programs have of the tile, add the bias, and store."""
    if rounded:
        found *= tl.load(x_scale + m)[None, :]
    last = True
    if split:
        last, found = added(found, parts, arrived, place, here, size)
    if last:
        if biased:
            found += tl.load(bias + n).to(tl.float32)[:, None]
        tl.store(y + place, found.to(y.dtype.element_ty), mask=here)


@triton.jit
def product(
    x,
    x_scale,
    words,
    scale,
    zero,
    shared,
    table,
    index,
    bias,
    y,
    parts,
    arrived,
    batch,
    rows,
    width,
    units,
    per_split,
    stride,
    group,
    scale_stride,
    x_row,
    x_place,
    magic,
    bits: tl.constexpr,
    per_unit: tl.constexpr,
    kind: tl.constexpr,
    point: tl.constexpr,
    scale_kind: tl.constexpr,
    zero_kind: tl.constexpr,
    group_kind: tl.constexpr,
    uniform: tl.constexpr,
    scaled: tl.constexpr,
    at_once: tl.constexpr,
    single: tl.constexpr,
    direct: tl.constexpr,
    biased: tl.constexpr,
    rounded: tl.constexpr,
    native: tl.constexpr,
    laid: tl.constexpr,
    whole: tl.constexpr,
    split: tl.constexpr,
    like: tl.constexpr,
    operand: tl.constexpr,
    precision: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_u: tl.constexpr,
):
    """x W^T for a tile of rows of x and of W and one of the parts of its units.

    Tiles are [rows of W, rows of x], since tensor cores multiply few rows of x as their second operand. x: [batch,
    width]; laid: [batch, places, units], `x_row` and `x_place` apart, or columns that are `turned`. at_once: all codes
    of a unit are decoded together (`paired`, or bytes); else those of one place after the other. scaled: where scales
    are multiplied: with the sums of the "tile", with those of every "step" (in which rows have one scale each), or with
    each "weight". uniform: the columns of a unit have one scale. single: numbers and scales are multiplied in the dtype
    of the operands, which holds both. direct: the GPU converts 8-bit floats. rounded: x holds codes with a scale per
    row. native: codes of both are multiplied. whole: steps have no column that the weight has not; after the last
    column, any code may stand in the words. like: the dtype to which weights are rounded; operand: in which they are
    multiplied. split: sums of parts are kept in `parts` [part, batch, rows], and the last program of a tile adds them
    in their order; `arrived` [tiles] counts, and is zero again.
    """
    tiles = tl.cdiv(batch, block_m)
    m = (tl.program_id(0) % tiles).to(tl.int64) * block_m + tl.arange(0, block_m)
    n = (tl.program_id(0) // tiles).to(tl.int64) * block_n + tl.arange(0, block_n)
    here, place = (m < batch)[None, :] & (n < rows)[:, None], m[None, :] * rows + n[:, None]
    m, n = tl.minimum(m, batch - 1), tl.minimum(n, rows - 1)  # no mask is needed; what is computed twice is not stored
    integers: tl.constexpr = native and kind == "integer"
    turn: tl.constexpr = at_once and per_unit > 1
    k = tl.arange(0, (per_unit if at_once else 1) * block_u)
    total = tl.zeros([block_n, block_m], tl.int32 if integers else tl.float32)
    sums = tl.zeros([block_m], tl.float32)  # of the inputs, for zero points
    for start in range(tl.program_id(1) * per_split, tl.minimum(units, (tl.program_id(1) + 1) * per_split), block_u):
        u = start + tl.arange(0, block_u)
        word = word_at(words, n, u, stride, 0, 1 if per_unit == 1 else bits * per_unit // 32, whole)
        step, step_sums = total, sums
        if scaled == "step":
            step, step_sums = tl.zeros_like(total), tl.zeros_like(sums)
        if scaled == "weight" and uniform:
            each, low = unit_scales(
                scale,
                zero,
                shared,
                index,
                n,
                u,
                width,
                group,
                scale_stride,
                per_unit,
                at_once,
                operand,
                single,
                scale_kind,
                zero_kind,
                group_kind,
            )
        for j in tl.static_range(1 if at_once else per_unit):
            columns = start * per_unit + k if at_once else u * per_unit + j
            at, there = columns, columns < (units * per_unit if laid else width)
            if laid and not at_once:
                at, there = j * x_place + u, u < units
            some = inputs_at(x, m, at, there, x_row, whole, turn and not laid, per_unit)
            value = values_at(
                words,
                word,
                table,
                magic,
                n,
                u,
                columns < width,
                stride,
                j,
                like,
                bits,
                per_unit,
                kind,
                point,
                turn,
                direct,
                native,
                whole,
                operand,
                some.dtype,
            )
            if scaled == "weight":
                if not uniform:
                    each, low = scale_at(
                        scale,
                        zero,
                        shared,
                        index,
                        n,
                        columns,
                        width,
                        group,
                        scale_stride,
                        scale_kind,
                        zero_kind,
                        group_kind,
                    )
                value = times_scale(value.to(operand) if single else value, each, low, zero_kind, single)
            elif zero_kind == "point":
                step_sums += tl.sum(some.to(tl.float32), axis=1)
            if integers:
                step = tl.dot(value, tl.trans(some), step, out_dtype=tl.int32)
            elif native:
                step = tl.dot(value, tl.trans(some), step, max_num_imprecise_acc=128)
            else:
                step = tl.dot(value.to(like).to(operand), tl.trans(some.to(operand)), step, input_precision=precision)
        if scaled == "step":
            first = start * per_unit + tl.zeros([1], tl.int32)
            each, low = scale_at(
                scale, zero, shared, index, n, first, width, group, scale_stride, scale_kind, zero_kind, group_kind
            )
            total += (step - low * step_sums[None, :] if zero_kind == "point" else step) * each
        else:
            total, sums = step, step_sums
    if scaled == "tile":
        each, low = scale_at(
            scale,
            zero,
            shared,
            index,
            n,
            tl.zeros([1], tl.int32),
            width,
            group,
            scale_stride,
            scale_kind,
            zero_kind,
            "one",
        )
        total = total.to(tl.float32)
        total = (total - low * sums[None, :] if zero_kind == "point" else total) * each
    finish(total, x_scale, bias, y, parts, arrived, m, n, place, here, batch * rows, rounded, split, biased)


@triton.jit
def vector(
    x,
    words,
    scale,
    zero,
    shared,
    table,
    index,
    bias,
    y,
    batch,
    rows,
    width,
    stride,
    scale_stride,
    x_row,
    low_one,
    high_one,
    group: tl.constexpr,
    bits: tl.constexpr,
    kind: tl.constexpr,
    point: tl.constexpr,
    scale_kind: tl.constexpr,
    zero_kind: tl.constexpr,
    group_kind: tl.constexpr,
    biased: tl.constexpr,
    direct: tl.constexpr,
    whole: tl.constexpr,
    block_n: tl.constexpr,
    block_u: tl.constexpr,
):
    """W x for some rows of W and one row of x, by one warp.

    No tensor cores and no shared memory, so that all words of a step are on their way at once: reading them is what a
    product with one row costs. A thread multiplies the codes of its words, and scales their sum, since the columns of a
    word have one scale. The threads of a warp read 32 consecutive words, and the inputs of each: both stay in their
    registers. What `lifted` adds to integers is subtracted once, from the sum of a word. words: int32. low_one,
    high_one: those of `lifted`. The other arguments are those of `product`.
    """
    per_word: tl.constexpr = 32 // bits
    by_pairs: tl.constexpr = bits <= 4 and x.dtype.element_ty != tl.float32  # less exact
    m = (tl.program_id(0) % batch).to(tl.int64)
    n = (tl.program_id(0) // batch).to(tl.int64) * block_n + tl.arange(0, block_n)
    here = n < rows
    n = tl.minimum(n, rows - 1)
    total = tl.zeros([block_n, block_u], tl.float32)
    for start in range(0, stride, block_u):
        u = start + tl.arange(0, block_u)
        word = word_at(words, n, tl.max_contiguous(u, 1), stride, 0, 1, whole)
        columns = u[:, None] * per_word + tl.arange(0, per_word)[None, :]
        if whole:
            some = tl.load(x + m * x_row + columns)
        else:
            some = tl.load(x + m * x_row + columns, mask=columns < width, other=0.0)
        at = tl.zeros([1], tl.int32) if group_kind == "one" else u * per_word
        each, low = scale_at(
            scale, zero, shared, index, n, at, width, group, scale_stride, scale_kind, zero_kind, group_kind
        )
        sums, lifts = tl.zeros([block_u], tl.float32), tl.zeros([block_u], tl.float32)
        for j in tl.static_range(per_word):
            one = column(some, j).to(tl.float32)
            sums += one
            lifts += one * (lift(j, bits, kind, by_pairs) + point)
        part = tl.zeros_like(total) - lifts[None, :] if kind == "integer" else tl.zeros_like(total)
        for j in tl.static_range(per_word):
            value = lifted(word, table, low_one.to(tl.uint32), high_one.to(tl.uint32), j, bits, kind, by_pairs, direct)
            if not whole and (kind == "e4m3" or kind == "e5m2"):  # what stands after the last column may be NaN
                value = tl.where((u * per_word + j < width)[None, :], value, 0.0)
            one = column(some, j).to(tl.float32)
            part = tl.fma(value, tl.broadcast_to(one[None, :], value.shape), part)
        if zero_kind == "point":
            part -= low * sums[None, :]
        total += part * each
        if zero_kind == "minimum":
            total += low * sums[None, :]
    found = tl.sum(total, axis=1)
    if biased:
        found += tl.load(bias + n).to(tl.float32)
    tl.store(y + m * rows + n, found.to(y.dtype.element_ty), mask=here)


@triton.jit
def weights(
    words,
    scale,
    zero,
    shared,
    table,
    index,
    out,
    rows,
    width,
    units,
    stride,
    group,
    scale_stride,
    magic,
    bits: tl.constexpr,
    per_unit: tl.constexpr,
    kind: tl.constexpr,
    point: tl.constexpr,
    scale_kind: tl.constexpr,
    zero_kind: tl.constexpr,
    group_kind: tl.constexpr,
    direct: tl.constexpr,
    like: tl.constexpr,
    operand: tl.constexpr,
    block_n: tl.constexpr,
    block_u: tl.constexpr,
):
    """Dequantize a tile of weights whose codes are decoded at once, as in `product`. out: [rows, width]."""
    n = tl.program_id(0).to(tl.int64) * block_n + tl.arange(0, block_n)
    u = tl.program_id(1) * block_u + tl.arange(0, block_u)
    inside = n < rows
    n = tl.minimum(n, rows - 1)
    word = word_at(words, n, u, stride, 0, 1, False)
    if per_unit > 1:
        value = turned(paired(word, magic, bits, kind, point, like, operand), True, per_unit)
    else:
        value = numbers(word.to(tl.int32), table, kind, point, direct)
    columns = tl.program_id(1) * block_u * per_unit + tl.arange(0, block_u * per_unit)
    each, low = scale_at(
        scale, zero, shared, index, n, u * per_unit, width, group, scale_stride, scale_kind, zero_kind, group_kind
    )
    value = times_scale(value, spread(each, per_unit), spread(low, per_unit), zero_kind, False)
    tl.store(
        out + n[:, None] * width + columns[None, :],
        value.to(out.dtype.element_ty),
        mask=inside[:, None] & (columns < width)[None, :],
    )


@triton.jit
def round_rows(
    x,
    static,
    codes,
    x_scale,
    width,
    units,
    x_row,
    places,
    largest,
    lowest,
    highest,
    smallest,
    digit,
    least,
    top,
    given: tl.constexpr,
    like: tl.constexpr,
    integer: tl.constexpr,
    block: tl.constexpr,
):
    """Round a row of x [width] to codes, with one scale: `static`, or its largest magnitude / largest.

    codes: [batch, places, units], zeros after the last column; the inputs of `product`. x_scale: [batch]; NaN if the
    row has one. like: the dtype of the computation, as in `numerics.quant.inputs.round_inputs`.
    smallest, digit: the smallest normal number of 8-bit floats, and the last digit of 1. least: the scale of a row of
    zeros; top: the largest scale.
    """
    m = tl.program_id(0).to(tl.int64)
    extent, unknown = tl.zeros([block], tl.float32), tl.zeros([block], tl.int32)
    for start in range(0, width, block):
        at = start + tl.arange(0, block)
        part = tl.load(x + m * x_row + at, mask=at < width, other=0).to(tl.float32)
        extent = tl.maximum(extent, tl.where(part == part, tl.abs(part), 0.0))
        unknown |= (part != part).to(tl.int32)
    if given:
        scale = tl.load(static).to(like).to(tl.float32)
    else:
        scale = tl.minimum(tl.div_rn(tl.max(extent, axis=0), largest), top).to(like).to(tl.float32)
        scale = tl.where(scale == 0, least, scale)
    for start in range(0, units * places, block):
        at = start + tl.arange(0, block)
        part = tl.load(x + m * x_row + at, mask=at < width, other=0).to(tl.float32)
        ratio = tl.div_rn(tl.where(part == part, part, 0.0), scale).to(like).to(tl.float32)
        ratio = tl.minimum(tl.maximum(ratio, lowest), highest)
        step = 1.0
        if not integer:  # the distance of 8-bit floats near the ratio; below `smallest`, they are evenly spaced
            power = (ratio.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            step = tl.maximum(power, smallest) * digit
        ratio = (ratio + 12582912.0 * step) - 12582912.0 * step  # to multiples of the step, ties to even
        place = m * places * units + (at % places) * units + at // places
        tl.store(codes + place, ratio.to(codes.dtype.element_ty), mask=at < units * places)
    known = tl.max(unknown, axis=0) == 0
    tl.store(x_scale + m, tl.where(known, scale, float("nan")))
