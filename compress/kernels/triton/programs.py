# type: ignore - the language of Triton, in which tensors and constants have no types of Python
"""The programs that run on the GPU, in Triton. `launch` chooses their tiles and calls them.

A unit is the shortest run of codes of a row that fills whole words: 8 codes of 4 bits in an int32, 32 of 3 bits in
three, 1 code of 8 bits in a byte. The words are read as they are stored, in whole runs of a row. Codes of 2 and 4 bits
are decoded together, two in a register (`paired`), and the columns of the inputs take their order (`turned`). For other
bits, a tile of units [rows, units] gives one tile of weights for each place in a unit; the weights at one place of
consecutive units are `per_unit` columns apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ruff: noqa: N803


@triton.jit
def numbers(codes, table, kind: tl.constexpr, point: tl.constexpr, direct: tl.constexpr):
    """The numbers of unsigned codes, in float32. direct: the GPU converts 8-bit floats."""
    if kind == "integer":  # 2^23 + code is the float32 with these bits
        return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + point)
    elif kind == "e2m1":  # the exponent of float16 begins at 2^-14, that of e2m1 at 2^0; subnormal numbers, too
        half = ((codes & 8) << 12) | ((codes & 7) << 9)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif kind == "e4m3":
        if direct:
            return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        half = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)  # at 2^-6
        found = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((codes & 0x7F) == 0x7F, float("nan"), found)
    elif kind == "e5m2":
        return (codes << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.load(table + codes)


@triton.jit
def word_at(words, rows, units, stride, at: tl.constexpr, per_unit_words: tl.constexpr, whole: tl.constexpr):
    """Word number `at` of the units of rows, [rows, units], unsigned. whole: no unit is outside; 0 for others."""
    place = units * per_unit_words + at
    if whole:
        found = tl.load(words + rows[:, None] * stride + place[None, :])
    else:
        found = tl.load(words + rows[:, None] * stride + place[None, :], mask=(place < stride)[None, :], other=0)
    return found.to(tl.uint32, bitcast=True) if words.dtype.element_ty == tl.int32 else found


@triton.jit
def code_at(words, word, rows, units, stride, j: tl.constexpr, bits: tl.constexpr, per_unit: tl.constexpr,
            whole: tl.constexpr):  # fmt: skip
    """Code number j of the units of rows, [rows, units] int32. word: the first word of the units."""
    if per_unit == 1:  # a byte
        return word.to(tl.int32)
    length: tl.constexpr = bits * per_unit // 32
    offset: tl.constexpr = j * bits % 32
    if length > 1:
        word = word_at(words, rows, units, stride, j * bits // 32, length, whole)
    code = word >> offset
    if offset + bits > 32:
        code |= word_at(words, rows, units, stride, j * bits // 32 + 1, length, whole) << (32 - offset)
    return (code & ((1 << bits) - 1)).to(tl.int32)


@triton.jit
def pair(word, magic, j: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, top: tl.constexpr):
    """Codes j and j + 16 / bits of words as 16-bit floats, before their offset or factor (`paired`).

    Both are decoded at once, in the halves of one register. top: bits of the mantissa. magic: for integers, the number
    with these bits in both halves, to which a code is added; a variable, since an instruction takes one constant alone.
    """
    if kind == "integer":
        found = ((word >> (j * bits)) & (((1 << bits) - 1) * 0x00010001)) | magic.to(tl.uint32)
    else:  # e2m1: the sign, and the three bits from the last one of the exponent on
        sign = (word << (12 - 4 * j)) & 0x80008000
        move: tl.constexpr = top - 1 - 4 * j
        found = word << move if move >= 0 else word >> -move
        found = sign | (found & (7 * 0x00010001 << (top - 1)))
    return (found & 0xFFFF).to(tl.uint16), (found >> 16).to(tl.uint16)


@triton.jit
def paired(word, magic, bits: tl.constexpr, kind: tl.constexpr, point: tl.constexpr, like: tl.constexpr,
           operand: tl.constexpr):  # fmt: skip
    """The numbers of the codes of words [rows, units], [rows, units * 32 / bits], in the order of `turned` columns.

    like: float16 or bfloat16. That order leaves the halves of a register next to each other.
    """
    if kind != "integer" and operand == tl.float32:
        like: tl.constexpr = tl.float16  # Triton's interpreter has no subnormal numbers of bfloat16
    top: tl.constexpr = 10 if like == tl.float16 else 7
    low0, high0 = pair(word, magic, 0, bits, kind, top)
    low1, high1 = pair(word, magic, 1, bits, kind, top)
    low2, high2 = pair(word, magic, 2, bits, kind, top)
    low3, high3 = pair(word, magic, 3, bits, kind, top)
    if bits == 2:
        low4, high4 = pair(word, magic, 4, bits, kind, top)
        low5, high5 = pair(word, magic, 5, bits, kind, top)
        low6, high6 = pair(word, magic, 6, bits, kind, top)
        low7, high7 = pair(word, magic, 7, bits, kind, top)
        low0, high0 = tl.join(low0, low4), tl.join(high0, high4)
        low1, high1 = tl.join(low1, low5), tl.join(high1, high5)
        low2, high2 = tl.join(low2, low6), tl.join(high2, high6)
        low3, high3 = tl.join(low3, low7), tl.join(high3, high7)
    low = tl.join(tl.join(low0, low2), tl.join(low1, low3))
    high = tl.join(tl.join(high0, high2), tl.join(high1, high3))
    value = tl.reshape(tl.join(low, high), [word.shape[0], word.shape[1] * 32 // bits]).to(like, bitcast=True)
    if kind == "integer":
        return value.to(operand) - ((1 << top) + point)
    return value.to(operand) * (16384.0 if like == tl.float16 else 8.507059173023462e37)  # 2^14, 2^126


@triton.jit
def turned(tile, back: tl.constexpr, per_unit: tl.constexpr):
    """A tile [rows, columns] with the columns of each unit in the order of `paired`: both halves of a word by turns.

    back: from that order.
    """
    half: tl.constexpr = per_unit // 2
    units: tl.constexpr = tile.shape[1] // per_unit
    split = tl.reshape(tile, [tile.shape[0], units, half, 2] if back else [tile.shape[0], units, 2, half])
    return tl.reshape(tl.permute(split, (0, 1, 3, 2)), [tile.shape[0], units * per_unit])


@triton.jit
def spread(per_unit_values, per_unit: tl.constexpr):
    """Values of units [rows, units] for each of their columns."""
    rows: tl.constexpr = per_unit_values.shape[0]
    units: tl.constexpr = per_unit_values.shape[1]
    return tl.reshape(tl.broadcast_to(per_unit_values[:, :, None], [rows, units, per_unit]), [rows, units * per_unit])


@triton.jit
def scale_at(scale, zero, shared, index, rows, columns, width, group, stride, scale_kind: tl.constexpr,
             zero_kind: tl.constexpr, group_kind: tl.constexpr):  # fmt: skip
    """Scale and zero point (or minimum, or 0) of the weights of rows in columns, [rows, columns] float32."""
    columns = tl.minimum(columns, width - 1)
    if group_kind == "index":
        groups = tl.load(index + columns)
    elif group_kind == "run":
        groups = columns // group
    else:
        groups = columns * 0
    place = rows[:, None] * stride + groups[None, :]
    found = tl.load(scale + place)
    if scale_kind == "e8m0":  # a byte is the exponent of a float32; 2^-127 is a subnormal number
        bits = found.to(tl.int32)
        found = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
    elif scale_kind == "e4m3":
        found = numbers(found.to(tl.int32), shared, "e4m3", 0, False) / tl.load(shared)
    found = found.to(tl.float32)
    low = tl.zeros_like(found) if zero_kind == "none" else tl.load(zero + place).to(tl.float32)
    return found, low


@triton.jit
def times_scale(value, each, low, zero_kind: tl.constexpr, exact: tl.constexpr):
    """The weights of numbers. exact: scales were converted to the dtype of the numbers."""
    if exact and zero_kind == "none":
        return value * each
    value = value.to(tl.float32)
    if zero_kind == "point":
        value -= low
    value *= each
    return value + low if zero_kind == "minimum" else value


@triton.jit
def product(x, x_scale, words, scale, zero, shared, table, index, bias, y, parts, arrived, batch, rows, width, units,
            per_split, stride, group, scale_stride, x_row, x_place, magic, bits: tl.constexpr, per_unit: tl.constexpr,
            kind: tl.constexpr, point: tl.constexpr, scale_kind: tl.constexpr, zero_kind: tl.constexpr,
            group_kind: tl.constexpr, uniform: tl.constexpr, scaled: tl.constexpr, at_once: tl.constexpr,
            exact: tl.constexpr, direct: tl.constexpr, biased: tl.constexpr, rounded: tl.constexpr,
            native: tl.constexpr, laid: tl.constexpr, whole: tl.constexpr, split: tl.constexpr, like: tl.constexpr,
            operand: tl.constexpr, precision: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
            block_u: tl.constexpr):  # fmt: skip
    """x W^T for a tile of rows of x and of W and one of the parts of its units.

    Tiles are [rows of W, rows of x], since tensor cores multiply few rows of x as their second operand. x: [batch,
    width]; laid: [batch, places, units], `x_row` and `x_place` apart. at_once: all codes of a unit are decoded together
    (`paired`, or bytes); else those of one place after the other. scaled: where scales are multiplied: with the sums of
    the "tile", with those of every "step" (in which rows have one scale each), or with each "weight". uniform: the
    columns of a unit have one scale. exact: the dtype of the operands holds scales. direct: the GPU converts 8-bit
    floats. rounded: x holds codes with a scale per row. native: codes of both are multiplied. whole: steps have no
    column that the weight has not; after the last column, any code may stand in the words. like: the dtype to which
    weights are rounded; operand: in which they are multiplied. split: sums of parts are kept in `parts` [part, batch,
    rows], and the last program of a tile adds them in their order; `arrived` [tiles] counts, and is zero again.
    """
    tiles = tl.cdiv(batch, block_m)
    part = tl.program_id(1).to(tl.int64)
    m = (tl.program_id(0) % tiles).to(tl.int64) * block_m + tl.arange(0, block_m)
    n = (tl.program_id(0) // tiles).to(tl.int64) * block_n + tl.arange(0, block_n)
    here = (m < batch)[None, :] & (n < rows)[:, None]
    place = m[None, :] * rows + n[:, None]
    m, n = tl.minimum(m, batch - 1), tl.minimum(n, rows - 1)  # no mask is needed; what is computed twice is not stored
    integers: tl.constexpr = native and kind == "integer"
    places: tl.constexpr = 1 if at_once else per_unit
    side: tl.constexpr = per_unit if at_once else 1  # columns per unit of a product
    k = tl.arange(0, side * block_u)
    total = tl.zeros([block_n, block_m], tl.int32 if integers else tl.float32)
    sums = tl.zeros([block_m], tl.float32)
    for start in range(tl.program_id(1) * per_split, tl.minimum(units, (tl.program_id(1) + 1) * per_split), block_u):
        u = start + tl.arange(0, block_u)
        word = word_at(words, n, u, stride, 0, 1 if per_unit == 1 else bits * per_unit // 32, whole)
        if scaled == "step":
            step, step_sums = tl.zeros([block_n, block_m], tl.float32), tl.zeros([block_m], tl.float32)
        if scaled == "weight" and uniform:
            each, low = scale_at(scale, zero, shared, index, n, u * per_unit, width, group, scale_stride, scale_kind,
                                 zero_kind, group_kind)  # fmt: skip
            if exact and zero_kind == "none":
                each = each.to(operand)
            if at_once:
                each, low = spread(each, per_unit), spread(low, per_unit)
        for j in tl.static_range(places):
            columns = start * per_unit + k if at_once else u * per_unit + j
            at = j * x_place + u if laid else columns
            there = u < units if laid else columns < width
            if whole:
                some = tl.load(x + m[:, None] * x_row + at[None, :])
            else:
                some = tl.load(x + m[:, None] * x_row + at[None, :], mask=there[None, :], other=0.0)
            if at_once and per_unit > 1:
                some = turned(some, False, per_unit)
                value = paired(word, magic, bits, kind, point, like, operand)
            else:
                code = code_at(words, word, n, u, stride, j, bits, per_unit, whole)
                if integers:
                    value = (code - point).to(tl.int8)
                elif native:
                    value = tl.where((columns < width)[None, :], code, 0).to(tl.uint8).to(some.dtype, bitcast=True)
                else:
                    value = numbers(code, table, kind, point, direct)
                    if kind == "e4m3" or kind == "e5m2":
                        value = tl.where((columns < width)[None, :], value, 0.0)
            if scaled == "weight":
                if not uniform:
                    each, low = scale_at(scale, zero, shared, index, n, columns, width, group, scale_stride, scale_kind,
                                         zero_kind, group_kind)  # fmt: skip
                value = times_scale(value.to(operand) if exact and uniform else value, each, low, zero_kind,
                                    exact and uniform)  # fmt: skip
            if zero_kind == "point" and scaled == "step":
                step_sums += tl.sum(some.to(tl.float32), axis=1)
            if zero_kind == "point" and scaled == "tile":
                sums += tl.sum(some.to(tl.float32), axis=1)
            if integers:
                total = tl.dot(value, tl.trans(some), total, out_dtype=tl.int32)
            elif native:
                total = tl.dot(value, tl.trans(some), total, max_num_imprecise_acc=128)
            else:
                value, some = value.to(like).to(operand), tl.trans(some.to(operand))
                if scaled == "step":
                    step = tl.dot(value, some, step, input_precision=precision)
                else:
                    total = tl.dot(value, some, total, input_precision=precision)
        if scaled == "step":
            first = start * per_unit + tl.zeros([1], tl.int32)
            each, low = scale_at(scale, zero, shared, index, n, first, width, group, scale_stride, scale_kind,
                                 zero_kind, group_kind)  # fmt: skip
            if zero_kind == "point":
                step -= low * step_sums[None, :]
            total += step * each
    found = total.to(tl.float32)
    if scaled == "tile":
        each, low = scale_at(scale, zero, shared, index, n, tl.zeros([1], tl.int32), width, group, scale_stride,
                             scale_kind, zero_kind, "one")  # fmt: skip
        if zero_kind == "point":
            found -= low * sums[None, :]
        found *= each
    if rounded:
        found *= tl.load(x_scale + m)[None, :]
    if split:
        count = tl.num_programs(1)
        tl.store(parts + part * batch * rows + place, found, mask=here)
        tl.debug_barrier()  # all threads have stored before one of them counts
        last = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == count - 1
        if last:
            found = tl.zeros([block_n, block_m], tl.float32)
            for one in range(count):
                before = parts + one.to(tl.int64) * batch * rows
                found += tl.load(before + place, mask=here, other=0, cache_modifier=".cg")
            tl.store(arrived + tl.program_id(0), 0)
            _finish(found, bias, y, n, place, here, biased)
    else:
        _finish(found, bias, y, n, place, here, biased)


@triton.jit
def _finish(found, bias, y, n, place, here, biased: tl.constexpr):
    """Add the bias and store a tile of the output."""
    if biased:
        found += tl.load(bias + n).to(tl.float32)[:, None]
    tl.store(y + place, found.to(y.dtype.element_ty), mask=here)


@triton.jit
def weights(words, scale, zero, shared, table, index, out, rows, width, units, stride, group, scale_stride, magic,
            bits: tl.constexpr, per_unit: tl.constexpr, kind: tl.constexpr, point: tl.constexpr,
            scale_kind: tl.constexpr, zero_kind: tl.constexpr, group_kind: tl.constexpr, direct: tl.constexpr,
            like: tl.constexpr, operand: tl.constexpr, block_n: tl.constexpr, block_u: tl.constexpr):  # fmt: skip
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
    each, low = scale_at(scale, zero, shared, index, n, u * per_unit, width, group, scale_stride, scale_kind, zero_kind,
                         group_kind)  # fmt: skip
    value = times_scale(value, spread(each, per_unit), spread(low, per_unit), zero_kind, False)
    tl.store(out + n[:, None] * width + columns[None, :], value.to(out.dtype.element_ty),
             mask=inside[:, None] & (columns < width)[None, :])  # fmt: skip


@triton.jit
def round_rows(x, static, codes, x_scale, width, units, x_row, places, largest, lowest, highest, smallest, digit, least,
               top, given: tl.constexpr, like: tl.constexpr, integer: tl.constexpr,
               block: tl.constexpr):  # fmt: skip
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
