# type: ignore - the language of Triton, in which tensors and constants have no types of Python
"""The programs that run on the GPU, in Triton. `launch` chooses their tiles and calls them.

A unit is the shortest run of codes of a row that fills whole words: 8 codes of 4 bits in an int32, 32 codes of 3 bits in
three, 1 code of 8 bits in a byte. A tile of units [rows, units] gives one tile of weights for each place in a unit; the
weights at one place of consecutive units are `per_unit` columns apart. So the words are read as they are stored, in
whole runs of a row, and are never shuffled. Codes of 2 and 4 bits are decoded in pairs (`pair`), the halves of a word.
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
def word_at(words, rows, units, inside, stride, at: tl.constexpr, per_unit_words: tl.constexpr):
    """Word number `at` of the units of rows, [rows, units], unsigned; 0 outside."""
    place = units * per_unit_words + at
    found = tl.load(words + rows[:, None] * stride + place[None, :], mask=inside[:, None] & (place < stride)[None, :],
                    other=0)  # fmt: skip
    return found.to(tl.uint32, bitcast=True) if words.dtype.element_ty == tl.int32 else found


@triton.jit
def code_at(words, word, rows, units, inside, stride, j: tl.constexpr, bits: tl.constexpr, per_unit: tl.constexpr):
    """Code number j of the units of rows, [rows, units] int32. word: the first word of the units."""
    if per_unit == 1:  # a byte
        return word.to(tl.int32)
    length: tl.constexpr = bits * per_unit // 32
    offset: tl.constexpr = j * bits % 32
    if length > 1:
        word = word_at(words, rows, units, inside, stride, j * bits // 32, length)
    code = word >> offset
    if offset + bits > 32:
        code |= word_at(words, rows, units, inside, stride, j * bits // 32 + 1, length) << (32 - offset)
    return (code & ((1 << bits) - 1)).to(tl.int32)


@triton.jit
def pair(word, magic, j: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, point: tl.constexpr, like: tl.constexpr,
         operand: tl.constexpr):  # fmt: skip
    """The numbers of codes j and j + 16 / bits of words [rows, units], one after the other: [rows, 2 units].

    like: float16 or bfloat16. Both codes of a word are decoded at once, in the halves of one register. magic: for
    integers, the number with these bits in both halves, to which a code is added; a variable, since an instruction of
    the GPU takes one constant alone.
    """
    if kind != "integer" and operand == tl.float32:
        like: tl.constexpr = tl.float16  # Triton's interpreter has no subnormal numbers of bfloat16
    top: tl.constexpr = 10 if like == tl.float16 else 7  # bits of the mantissa
    if kind == "integer":
        found = ((word >> (j * bits)) & (((1 << bits) - 1) * 0x00010001)) | magic.to(tl.uint32)
    else:  # e2m1: the sign, and the three bits from the last one of the exponent on
        sign = (word << (12 - 4 * j)) & 0x80008000
        move: tl.constexpr = top - 1 - 4 * j
        found = word << move if move >= 0 else word >> -move
        found = sign | (found & (7 * 0x00010001 << (top - 1)))
    low = (found & 0xFFFF).to(tl.uint16).to(like, bitcast=True)
    high = (found >> 16).to(tl.uint16).to(like, bitcast=True)
    value = tl.reshape(tl.join(low, high), [word.shape[0], 2 * word.shape[1]]).to(operand)
    if kind == "integer":
        return value - ((1 << top) + point)
    return value * (16384.0 if like == tl.float16 else 8.507059173023462e37)  # 2^14, 2^126


@triton.jit
def scale_at(scale, zero, shared, index, rows, columns, inside, width, group, stride, scale_kind: tl.constexpr,
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
    found = tl.load(scale + place, mask=inside[:, None], other=0)
    if scale_kind == "e8m0":  # a byte is the exponent of a float32; 2^-127 is a subnormal number
        bits = found.to(tl.int32)
        found = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
    elif scale_kind == "e4m3":
        found = numbers(found.to(tl.int32), shared, "e4m3", 0, False) / tl.load(shared)
    found = found.to(tl.float32)
    if zero_kind == "none":
        low = tl.zeros_like(found)
    else:
        low = tl.load(zero + place, mask=inside[:, None], other=0).to(tl.float32)
    return found, low


@triton.jit
def product(x, x_scale, words, scale, zero, shared, table, index, bias, y, parts, arrived, batch, rows, width, units,
            per_split, stride, group, scale_stride, x_row, x_place, magic, bits: tl.constexpr, per_unit: tl.constexpr,
            kind: tl.constexpr, point: tl.constexpr, scale_kind: tl.constexpr, zero_kind: tl.constexpr,
            group_kind: tl.constexpr, uniform: tl.constexpr, scaled: tl.constexpr, paired: tl.constexpr,
            exact: tl.constexpr, direct: tl.constexpr, biased: tl.constexpr, rounded: tl.constexpr, native: tl.constexpr,
            laid: tl.constexpr, split: tl.constexpr, like: tl.constexpr, operand: tl.constexpr,
            precision: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_u: tl.constexpr):  # fmt: skip
    """x W^T for a tile of rows of x and of W and one of the parts of its units.

    Tiles are [rows of W, rows of x]: tensor cores read the weights from registers, where they are decoded. x: [batch,
    width]; laid: [batch, places, units], with both of a pair side by side, `x_row` and `x_place` apart. scaled: where
    scales are multiplied: with the sums of the "tile", with those of every "step" (in which rows have one scale each),
    or with each "weight". uniform: the columns of a unit have one scale. exact: the dtype of the operands holds scales. rounded: x holds codes with a scale per row.
    native: codes of both are multiplied. like: the dtype to which weights are rounded; operand: in which they are
    multiplied. After the last column, any code may stand in the words. split: sums of parts are kept in `parts` [part,
    batch, rows], and the last program of a tile adds them in their order; `arrived` [tiles] counts, and is zero again.
    """
    tiles = tl.cdiv(batch, block_m)
    part = tl.program_id(1)
    m = (tl.program_id(0) % tiles).to(tl.int64) * block_m + tl.arange(0, block_m)
    n = (tl.program_id(0) // tiles).to(tl.int64) * block_n + tl.arange(0, block_n)
    present, inside = m < batch, n < rows
    integers: tl.constexpr = native and kind == "integer"
    side: tl.constexpr = 2 if paired else 1
    places: tl.constexpr = per_unit // side
    k = tl.arange(0, side * block_u)
    total = tl.zeros([block_n, block_m], tl.int32 if integers else tl.float32)
    sums = tl.zeros([block_m], tl.float32)
    for start in range(part * per_split, tl.minimum(units, (part + 1) * per_split), block_u):
        u = start + tl.arange(0, block_u)
        word = word_at(words, n, u, inside, stride, 0, 1 if per_unit == 1 else bits * per_unit // 32)
        if scaled == "step":
            step, step_sums = tl.zeros([block_n, block_m], tl.float32), tl.zeros([block_m], tl.float32)
        if scaled == "weight" and uniform:
            each, low = scale_at(scale, zero, shared, index, n, u * per_unit, inside, width, group, scale_stride,
                                 scale_kind, zero_kind, group_kind)  # fmt: skip
            if exact and zero_kind == "none":
                each = each.to(operand)
            if paired:
                each = tl.reshape(tl.join(each, each), [block_n, 2 * block_u])
                if zero_kind != "none":
                    low = tl.reshape(tl.join(low, low), [block_n, 2 * block_u])
        for j in tl.static_range(places):
            columns = (start + k // side) * per_unit + j + (k % side) * places
            at = j * x_place + start * side + k if laid else columns
            there = start * side + k < units * side if laid else columns < width
            some = tl.load(x + m[None, :] * x_row + at[:, None], mask=present[None, :] & there[:, None], other=0.0)
            if paired:
                value = pair(word, magic, j, bits, kind, point, like, operand)
            else:
                code = code_at(words, word, n, u, inside, stride, j, bits, per_unit)
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
                    each, low = scale_at(scale, zero, shared, index, n, columns, inside, width, group, scale_stride,
                                         scale_kind, zero_kind, group_kind)  # fmt: skip
                if uniform and exact and zero_kind == "none":
                    value = value.to(operand) * each
                else:
                    value = value.to(tl.float32)
                    if zero_kind == "point":
                        value -= low
                    value *= each
                    if zero_kind == "minimum":
                        value += low
            if zero_kind == "point" and scaled == "step":
                step_sums += tl.sum(some.to(tl.float32), axis=0)
            if zero_kind == "point" and scaled == "tile":
                sums += tl.sum(some.to(tl.float32), axis=0)
            if integers:
                total = tl.dot(value, some, total, out_dtype=tl.int32)
            elif native:
                total = tl.dot(value, some, total, max_num_imprecise_acc=128)
            else:
                value = value.to(like).to(operand)
                if scaled == "step":
                    step = tl.dot(value, some.to(operand), step, input_precision=precision)
                else:
                    total = tl.dot(value, some.to(operand), total, input_precision=precision)
        if scaled == "step":
            each, low = scale_at(scale, zero, shared, index, n, start * per_unit + tl.zeros([1], tl.int32), inside,
                                 width, group, scale_stride, scale_kind, zero_kind, group_kind)  # fmt: skip
            if zero_kind == "point":
                step -= low * step_sums[None, :]
            total += step * each
    found = total.to(tl.float32)
    if scaled == "tile":
        each, low = scale_at(scale, zero, shared, index, n, tl.zeros([1], tl.int32), inside, width, group, scale_stride,
                             scale_kind, zero_kind, "one")  # fmt: skip
        if zero_kind == "point":
            found -= low * sums[None, :]
        found *= each
    if rounded:
        found *= tl.load(x_scale + m, mask=present, other=0)[None, :]
    place, here = m[None, :] * rows + n[:, None], present[None, :] & inside[:, None]
    if split:
        count = tl.num_programs(1)
        tl.store(parts + part * batch.to(tl.int64) * rows + place, found, mask=here)
        tl.debug_barrier()  # all threads have stored before one of them counts
        last = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == count - 1
        if last:
            found = tl.zeros([block_n, block_m], tl.float32)
            for one in range(count):
                found += tl.load(parts + one * batch.to(tl.int64) * rows + place, mask=here, other=0, cache_modifier=".cg")
            tl.store(arrived + tl.program_id(0), 0)
            _finish(found, bias, y, n, inside, place, here, biased)
    else:
        _finish(found, bias, y, n, inside, place, here, biased)


@triton.jit
def _finish(found, bias, y, n, inside, place, here, biased: tl.constexpr):
    """Add the bias and store a tile of the output."""
    if biased:
        found += tl.load(bias + n, mask=inside, other=0).to(tl.float32)[:, None]
    tl.store(y + place, found.to(y.dtype.element_ty), mask=here)


@triton.jit
def round_rows(x, static, codes, x_scale, width, units, x_row, per_unit, side, largest, lowest, highest, smallest,
               digit, least, top, given: tl.constexpr, like: tl.constexpr, integer: tl.constexpr,
               block: tl.constexpr):  # fmt: skip
    """Round a row of x [width] to codes, with one scale: `static`, or its largest magnitude / largest.

    codes: [batch, places, units, side], zeros after the last column; the inputs of `product` that are laid. x_scale:
    [batch]; NaN if the row has one. like: the dtype of the computation, as in `numerics.quant.inputs.round_inputs`.
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
    places = per_unit // side
    for start in range(0, units * per_unit, block):
        at = start + tl.arange(0, block)
        part = tl.load(x + m * x_row + at, mask=at < width, other=0).to(tl.float32)
        ratio = tl.div_rn(tl.where(part == part, part, 0.0), scale).to(like).to(tl.float32)
        ratio = tl.minimum(tl.maximum(ratio, lowest), highest)
        step = 1.0
        if not integer:  # the distance of 8-bit floats near the ratio; below `smallest`, they are evenly spaced
            power = (ratio.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            step = tl.maximum(power, smallest) * digit
        ratio = (ratio + 12582912.0 * step) - 12582912.0 * step  # to multiples of the step, ties to even
        inner = at % per_unit
        place = m * per_unit * units + (inner % places) * units * side + (at // per_unit) * side + inner // places
        tl.store(codes + place, ratio.to(codes.dtype.element_ty), mask=at < units * per_unit)
    known = tl.max(unknown, axis=0) == 0
    tl.store(x_scale + m, tl.where(known, scale, float("nan")))
