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
def inputs_at(x, m, positions, is_inside, x_row, is_complete: tl.constexpr, turn: tl.constexpr, per_unit: tl.constexpr):
    """Return inputs [rows of x, columns] at positions of rows; zeros elsewhere.

    Args:
        turn: whether to reorder the columns as `turned`.
    """
    if is_complete:
        tile = tl.load(x + m[:, None] * x_row + positions[None, :])
    else:
        tile = tl.load(x + m[:, None] * x_row + positions[None, :], mask=is_inside[None, :], other=0.0)
    if turn:
        tile = turned(tile, False, per_unit)
    return tile


@triton.jit
def added(sums, parts, arrived, positions, is_inside, size):
    """Store the sums of this program, and return whether it is the last one of its tile, and the total in order.

    Args:
        size: elements of a part.
    """
    count = tl.num_programs(1)
    tl.store(parts + tl.program_id(1) * size + positions, sums, mask=is_inside)
    tl.debug_barrier()  # all threads have stored before one of them counts
    is_last = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == count - 1
    total = tl.zeros_like(sums)
    if is_last:
        for part in range(count):
            total += tl.load(parts + part * size + positions, mask=is_inside, other=0, cache_modifier=".cg")
        tl.store(arrived + tl.program_id(0), 0)
    return is_last, total


@triton.jit
def finish(
    sums,
    x_scale,
    bias,
    y,
    parts,
    arrived,
    m,
    n,
    positions,
    is_inside,
    size,
    rounded: tl.constexpr,
    split: tl.constexpr,
    biased: tl.constexpr,
):
    """Multiply by the scales of inputs, add the sums of other programs of the tile, add the bias, and store."""
    if rounded:
        sums *= tl.load(x_scale + m)[None, :]
    is_last = True
    if split:
        is_last, sums = added(sums, parts, arrived, positions, is_inside, size)
    if is_last:
        if biased:
            sums += tl.load(bias + n).to(tl.float32)[:, None]
        tl.store(y + positions, sums.to(y.dtype.element_ty), mask=is_inside)


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
    is_complete: tl.constexpr,
    split: tl.constexpr,
    like: tl.constexpr,
    operand: tl.constexpr,
    precision: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_u: tl.constexpr,
):
    """Compute x W^T for a tile of rows of x and of W and one of the parts of its units.

    Tiles are [rows of W, rows of x], since tensor cores multiply few rows of x as their second operand. After the last
    column, any code may be stored in the words.

    Args:
        x: [batch, width], or, if `laid`, [batch, places, units], `x_row` and `x_place` apart, or `turned` columns.
        parts: sums [part, batch, rows] of `split`; the last program of a tile adds them in order.
        arrived: [tiles], counts the stored parts, and is zero again at the end.
        uniform: the columns of a unit have one scale.
        scaled: where scales are multiplied: with the sums of the "tile", with those of every "step" (in which rows have
            one scale each), or with each "weight".
        at_once: all codes of a unit are decoded together (`paired`, or bytes); otherwise one place after the other.
        single: numbers and scales are multiplied in the dtype of the operands, which represents both.
        direct: the GPU converts 8-bit floats.
        rounded: x contains codes with a scale per row.
        native: codes of x and W are multiplied.
        is_complete: steps have no column outside of the weight.
        split: several programs compute parts of a tile.
        like: dtype to which weights are rounded.
        operand: dtype in which weights are multiplied.
    """
    tiles = tl.cdiv(batch, block_m)
    m = (tl.program_id(0) % tiles).to(tl.int64) * block_m + tl.arange(0, block_m)
    n = (tl.program_id(0) // tiles).to(tl.int64) * block_n + tl.arange(0, block_n)
    is_inside, positions = (m < batch)[None, :] & (n < rows)[:, None], m[None, :] * rows + n[:, None]
    m, n = tl.minimum(m, batch - 1), tl.minimum(n, rows - 1)  # no mask is needed; duplicates are not stored
    integers: tl.constexpr = native and kind == "integer"
    turn: tl.constexpr = at_once and per_unit > 1
    k = tl.arange(0, (per_unit if at_once else 1) * block_u)
    total = tl.zeros([block_n, block_m], tl.int32 if integers else tl.float32)
    sums = tl.zeros([block_m], tl.float32)  # of the inputs, for zero points
    for start in range(tl.program_id(1) * per_split, tl.minimum(units, (tl.program_id(1) + 1) * per_split), block_u):
        u = start + tl.arange(0, block_u)
        word = word_at(words, n, u, stride, 0, 1 if per_unit == 1 else bits * per_unit // 32, is_complete)
        step, step_sums = total, sums
        if scaled == "step":
            step, step_sums = tl.zeros_like(total), tl.zeros_like(sums)
        if scaled == "weight" and uniform:
            step_scale, low = unit_scales(
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
            input_positions, has_input = columns, columns < (units * per_unit if laid else width)
            if laid and not at_once:
                input_positions, has_input = j * x_place + u, u < units
            inputs = inputs_at(x, m, input_positions, has_input, x_row, is_complete, turn and not laid, per_unit)
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
                is_complete,
                operand,
                inputs.dtype,
            )
            if scaled == "weight":
                if not uniform:
                    step_scale, low = scale_at(
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
                value = times_scale(value.to(operand) if single else value, step_scale, low, zero_kind, single)
            elif zero_kind == "point":
                step_sums += tl.sum(inputs.to(tl.float32), axis=1)
            if integers:
                step = tl.dot(value, tl.trans(inputs), step, out_dtype=tl.int32)
            elif native:
                step = tl.dot(value, tl.trans(inputs), step, max_num_imprecise_acc=128)
            else:
                step = tl.dot(value.to(like).to(operand), tl.trans(inputs.to(operand)), step, input_precision=precision)
        if scaled == "step":
            start_column = start * per_unit + tl.zeros([1], tl.int32)
            step_scale, low = scale_at(
                scale,
                zero,
                shared,
                index,
                n,
                start_column,
                width,
                group,
                scale_stride,
                scale_kind,
                zero_kind,
                group_kind,
            )
            total += (step - low * step_sums[None, :] if zero_kind == "point" else step) * step_scale
        else:
            total, sums = step, step_sums
    if scaled == "tile":
        step_scale, low = scale_at(
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
        total = (total - low * sums[None, :] if zero_kind == "point" else total) * step_scale
    finish(total, x_scale, bias, y, parts, arrived, m, n, positions, is_inside, batch * rows, rounded, split, biased)


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
    is_complete: tl.constexpr,
    block_n: tl.constexpr,
    block_u: tl.constexpr,
):
    """Compute W x for some rows of W and one row of x, by one warp.

    No tensor cores and no shared memory, so that all words of a step are loaded at once: reading them dominates a
    product with one row. A thread multiplies the codes of its words, and scales their sum, since the columns of a
    word have one scale. The threads of a warp read 32 consecutive words, and the inputs of each: both stay in their
    registers. What `lifted` adds to integers is subtracted once, from the sum of a word. Other arguments are those of
    `product`.

    Args:
        words: int32.
        low_one: as of `lifted`.
        high_one: as of `lifted`.
    """
    per_word: tl.constexpr = 32 // bits
    by_pairs: tl.constexpr = bits <= 4 and x.dtype.element_ty != tl.float32  # less exact
    m = (tl.program_id(0) % batch).to(tl.int64)
    n = (tl.program_id(0) // batch).to(tl.int64) * block_n + tl.arange(0, block_n)
    is_inside = n < rows
    n = tl.minimum(n, rows - 1)
    total = tl.zeros([block_n, block_u], tl.float32)
    for start in range(0, stride, block_u):
        u = start + tl.arange(0, block_u)
        word = word_at(words, n, tl.max_contiguous(u, 1), stride, 0, 1, is_complete)
        columns = u[:, None] * per_word + tl.arange(0, per_word)[None, :]
        if is_complete:
            inputs = tl.load(x + m * x_row + columns)
        else:
            inputs = tl.load(x + m * x_row + columns, mask=columns < width, other=0.0)
        scale_columns = tl.zeros([1], tl.int32) if group_kind == "one" else u * per_word
        step_scale, low = scale_at(
            scale, zero, shared, index, n, scale_columns, width, group, scale_stride, scale_kind, zero_kind, group_kind
        )
        sums, lifts = tl.zeros([block_u], tl.float32), tl.zeros([block_u], tl.float32)
        for j in tl.static_range(per_word):
            input_column = column(inputs, j).to(tl.float32)
            sums += input_column
            lifts += input_column * (lift(j, bits, kind, by_pairs) + point)
        part = tl.zeros_like(total) - lifts[None, :] if kind == "integer" else tl.zeros_like(total)
        for j in tl.static_range(per_word):
            value = lifted(word, table, low_one.to(tl.uint32), high_one.to(tl.uint32), j, bits, kind, by_pairs, direct)
            if not is_complete and (kind == "e4m3" or kind == "e5m2"):  # codes after the last column may be NaN
                value = tl.where((u * per_word + j < width)[None, :], value, 0.0)
            input_column = column(inputs, j).to(tl.float32)
            part = tl.fma(value, tl.broadcast_to(input_column[None, :], value.shape), part)
        if zero_kind == "point":
            part -= low * sums[None, :]
        total += part * step_scale
        if zero_kind == "minimum":
            total += low * sums[None, :]
    sums_of_rows = tl.sum(total, axis=1)
    if biased:
        sums_of_rows += tl.load(bias + n).to(tl.float32)
    tl.store(y + m * rows + n, sums_of_rows.to(y.dtype.element_ty), mask=is_inside)


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
    """Dequantize a tile of weights whose codes are decoded at once, as in `product`.

    Args:
        out: [rows, width].
    """
    n = tl.program_id(0).to(tl.int64) * block_n + tl.arange(0, block_n)
    u = tl.program_id(1) * block_u + tl.arange(0, block_u)
    is_inside = n < rows
    n = tl.minimum(n, rows - 1)
    word = word_at(words, n, u, stride, 0, 1, False)
    if per_unit > 1:
        value = turned(paired(word, magic, bits, kind, point, like, operand), True, per_unit)
    else:
        value = numbers(word.to(tl.int32), table, kind, point, direct)
    columns = tl.program_id(1) * block_u * per_unit + tl.arange(0, block_u * per_unit)
    step_scale, low = scale_at(
        scale, zero, shared, index, n, u * per_unit, width, group, scale_stride, scale_kind, zero_kind, group_kind
    )
    value = times_scale(value, spread(step_scale, per_unit), spread(low, per_unit), zero_kind, False)
    tl.store(
        out + n[:, None] * width + columns[None, :],
        value.to(out.dtype.element_ty),
        mask=is_inside[:, None] & (columns < width)[None, :],
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
    smallest_scale,
    largest_scale,
    has_static_scale: tl.constexpr,
    like: tl.constexpr,
    integer: tl.constexpr,
    block: tl.constexpr,
):
    """Quantize a row of x [width] with one scale: `static`, or its largest magnitude / largest.

    Args:
        codes: [batch, places, units], zeros after the last column; the inputs of `product`.
        x_scale: [batch]; NaN if the row contains one.
        smallest: smallest normal number of 8-bit floats.
        digit: epsilon of 8-bit floats.
        smallest_scale: the scale of a row of zeros.
        largest_scale: the largest scale.
        like: dtype of the computation, as in `numerics.quant.inputs.round_inputs`.
    """
    m = tl.program_id(0).to(tl.int64)
    extent, is_nan = tl.zeros([block], tl.float32), tl.zeros([block], tl.int32)
    for start in range(0, width, block):
        positions = start + tl.arange(0, block)
        part = tl.load(x + m * x_row + positions, mask=positions < width, other=0).to(tl.float32)
        extent = tl.maximum(extent, tl.where(part == part, tl.abs(part), 0.0))
        is_nan |= (part != part).to(tl.int32)
    if has_static_scale:
        scale = tl.load(static).to(like).to(tl.float32)
    else:
        scale = tl.minimum(tl.div_rn(tl.max(extent, axis=0), largest), largest_scale).to(like).to(tl.float32)
        scale = tl.where(scale == 0, smallest_scale, scale)
    for start in range(0, units * places, block):
        positions = start + tl.arange(0, block)
        part = tl.load(x + m * x_row + positions, mask=positions < width, other=0).to(tl.float32)
        ratio = tl.div_rn(tl.where(part == part, part, 0.0), scale).to(like).to(tl.float32)
        ratio = tl.minimum(tl.maximum(ratio, lowest), highest)
        step = 1.0
        if not integer:  # the distance of 8-bit floats near the ratio; below `smallest`, they are evenly spaced
            power = (ratio.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            step = tl.maximum(power, smallest) * digit
        ratio = (ratio + 12582912.0 * step) - 12582912.0 * step  # to multiples of the step, ties to even
        code_positions = m * places * units + (positions % places) * units + positions // places
        tl.store(codes + code_positions, ratio.to(codes.dtype.element_ty), mask=positions < units * places)
    has_no_nan = tl.max(is_nan, axis=0) == 0
    tl.store(x_scale + m, tl.where(has_no_nan, scale, float("nan")))
