# type: ignore - the language of Triton, in which tensors and constants have no types of Python
"""The programs that run on the GPU, in Triton. `launch` chooses their tiles and calls them.

A unit is the shortest run of codes of a row that fills whole int32 words: 8 codes of 4 bits, 32 codes of 3 bits. A tile
of units [rows, units] gives one tile of weights for each place in a unit; the weights at one place of consecutive units
are `per_unit` columns apart. So the words are read as they are stored, in whole runs of a row, and are never shuffled.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ruff: noqa: N803


@triton.jit
def numbers(codes, table, kind: tl.constexpr, point: tl.constexpr):
    """The numbers of unsigned codes, in float32."""
    if kind == "integer":  # 2^23 + code is the float32 with these bits
        return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + point)
    elif kind == "e2m1":  # the exponent of float16 begins at 2^-14, that of e2m1 at 2^0; subnormal numbers, too
        half = ((codes & 8) << 12) | ((codes & 7) << 9)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif kind == "e4m3":  # at 2^-6
        half = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
        found = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((codes & 0x7F) == 0x7F, float("nan"), found)
    elif kind == "e5m2":
        return (codes << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.load(table + codes)


@triton.jit
def word_at(words, rows, units, inside, stride, at: tl.constexpr, per_unit_words: tl.constexpr):
    """Word number `at` of the units of rows, [rows, units] uint32; 0 outside."""
    place = units * per_unit_words + at
    found = tl.load(words + rows[:, None] * stride + place[None, :], mask=inside[:, None] & (place < stride)[None, :],
                    other=0)  # fmt: skip
    return found.to(tl.uint32, bitcast=True)


@triton.jit
def code_at(words, word, rows, units, inside, stride, j: tl.constexpr, bits: tl.constexpr, per_unit: tl.constexpr):
    """Code number j of the units of rows, [rows, units] int32. word: the first word of the units."""
    length: tl.constexpr = bits * per_unit // 32
    offset: tl.constexpr = j * bits % 32
    if length > 1:
        word = word_at(words, rows, units, inside, stride, j * bits // 32, length)
    code = word >> offset
    if offset + bits > 32:
        code |= word_at(words, rows, units, inside, stride, j * bits // 32 + 1, length) << (32 - offset)
    return (code & ((1 << bits) - 1)).to(tl.int32)


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
        found = numbers(found.to(tl.int32), shared, "e4m3", 0) / tl.load(shared)
    found = found.to(tl.float32)
    if zero_kind == "none":
        low = tl.zeros_like(found)
    else:
        low = tl.load(zero + place, mask=inside[:, None], other=0).to(tl.float32)
    return found, low


@triton.jit
def vector(x, words, scale, zero, shared, table, index, bias, y, rows, width, units, per_split, stride, group,
           scale_stride, bits: tl.constexpr, per_unit: tl.constexpr, kind: tl.constexpr, point: tl.constexpr,
           scale_kind: tl.constexpr, zero_kind: tl.constexpr, group_kind: tl.constexpr, uniform: tl.constexpr,
           biased: tl.constexpr, block_n: tl.constexpr, block_u: tl.constexpr):  # fmt: skip
    """W x for one row of inputs x [width], for some rows of W and one of the splits of its units.

    y: [splits, rows]. per_split: units per split. uniform: the columns of a unit have one scale.
    """
    split = tl.program_id(1)
    n = tl.program_id(0).to(tl.int64) * block_n + tl.arange(0, block_n)
    inside = n < rows
    total = tl.zeros([block_n, block_u], tl.float32)
    for start in range(split * per_split, tl.minimum(units, (split + 1) * per_split), block_u):
        u = start + tl.arange(0, block_u)
        word = word_at(words, n, u, inside, stride, 0, bits * per_unit // 32)
        part = tl.zeros([block_n, block_u], tl.float32)
        for j in tl.static_range(per_unit):
            columns = u * per_unit + j
            if j == 0 or not uniform:
                each, low = scale_at(scale, zero, shared, index, n, columns, inside, width, group, scale_stride,
                                     scale_kind, zero_kind, group_kind)  # fmt: skip
            code = code_at(words, word, n, u, inside, stride, j, bits, per_unit)
            value = numbers(code, table, kind, point)
            if zero_kind == "point":
                value -= low
            if zero_kind == "minimum":
                value = value * each + low
            elif not uniform:
                value *= each
            there = columns < width
            one = tl.load(x + columns, mask=there, other=0).to(tl.float32)[None, :]
            part += tl.where(there[None, :], value * one, 0.0)
        if zero_kind == "minimum" or not uniform:
            total += part
        else:
            total += part * each
    found = tl.sum(total, axis=1)
    if biased:
        found += tl.load(bias + n, mask=inside, other=0).to(tl.float32)
    tl.store(y + split.to(tl.int64) * rows + n, found.to(y.dtype.element_ty), mask=inside)


@triton.jit
def matrix(x, x_scale, x_sum, words, scale, zero, shared, table, index, bias, y, batch, rows, width, units, per_split,
           stride, group, scale_stride, x_row, x_unit, x_step, bits: tl.constexpr, per_unit: tl.constexpr,
           kind: tl.constexpr, point: tl.constexpr, scale_kind: tl.constexpr, zero_kind: tl.constexpr,
           group_kind: tl.constexpr, uniform: tl.constexpr, biased: tl.constexpr, rounded: tl.constexpr,
           native: tl.constexpr, like: tl.constexpr, operand: tl.constexpr, precision: tl.constexpr,
           block_m: tl.constexpr, block_n: tl.constexpr, block_u: tl.constexpr):  # fmt: skip
    """x W^T for a tile of rows of x and of W and one of the splits of its units.

    y: [splits, batch, rows]. Element (m, unit, place in it) of x is at m x_row + unit x_unit + place x_step. rounded: x
    holds codes with a scale per row. native: codes of both are multiplied, and their scales at the end; x_sum: the sum
    of the codes of each row of x. like: the dtype to which weights are rounded; operand: in which they are multiplied.
    After the last column, any code may stand in the words.
    """
    tiles = tl.cdiv(batch, block_m)
    split = tl.program_id(1)
    m = (tl.program_id(0) % tiles).to(tl.int64) * block_m + tl.arange(0, block_m)
    n = (tl.program_id(0) // tiles).to(tl.int64) * block_n + tl.arange(0, block_n)
    present, inside = m < batch, n < rows
    total = tl.zeros([block_m, block_n], tl.int32 if native and kind == "integer" else tl.float32)
    for start in range(split * per_split, tl.minimum(units, (split + 1) * per_split), block_u):
        u = start + tl.arange(0, block_u)
        word = word_at(words, n, u, inside, stride, 0, bits * per_unit // 32)
        for j in tl.static_range(per_unit):
            columns = u * per_unit + j
            if not native and (j == 0 or not uniform):
                each, low = scale_at(scale, zero, shared, index, n, columns, inside, width, group, scale_stride,
                                     scale_kind, zero_kind, group_kind)  # fmt: skip
            code = code_at(words, word, n, u, inside, stride, j, bits, per_unit)
            part = tl.load(x + m[:, None] * x_row + u[None, :] * x_unit + j * x_step,
                           mask=present[:, None] & (columns < width)[None, :], other=0.0)  # fmt: skip
            if native and kind == "integer":
                total = tl.dot(part, tl.trans((code - point).to(tl.int8)), total, out_dtype=tl.int32)
            elif native:
                code = tl.where((columns < width)[None, :], code, 0)
                total = tl.dot(part, tl.trans(code.to(tl.uint8).to(part.dtype, bitcast=True)), total)
            else:
                value = numbers(code, table, kind, point)
                if zero_kind == "point":
                    value -= low
                value *= each
                if zero_kind == "minimum":
                    value += low
                value = tl.where((columns < width)[None, :], value, 0.0).to(like).to(operand)
                total = tl.dot(part.to(operand), tl.trans(value), total, input_precision=precision)
    found = total.to(tl.float32)
    if native:
        first, zeros = scale_at(scale, zero, shared, index, n, tl.zeros([1], tl.int32), inside, width, group,
                                scale_stride, scale_kind, zero_kind, "one")  # fmt: skip
        if zero_kind == "point":
            found -= tl.load(x_sum + m, mask=present, other=0).to(tl.float32)[:, None] * tl.trans(zeros)
        found *= tl.trans(first)
    if rounded:
        found *= tl.load(x_scale + m, mask=present, other=0)[:, None]
    if biased:
        found += tl.load(bias + n, mask=inside, other=0).to(tl.float32)[None, :]
    place = (split * batch + m)[:, None] * rows + n[None, :]
    tl.store(y + place, found.to(y.dtype.element_ty), mask=present[:, None] & inside[None, :])


@triton.jit
def combine(parts, bias, y, splits, count, rows, biased: tl.constexpr, block: tl.constexpr):
    """The sum over splits of parts [splits, count], in their order, plus bias [rows]."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    total = tl.zeros([block], tl.float32)
    for split in range(splits):
        total += tl.load(parts + split * count + at, mask=inside, other=0)
    if biased:
        total += tl.load(bias + at % rows, mask=inside, other=0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def round_rows(x, static, codes, x_scale, x_sum, width, units, x_row, per_unit, largest, lowest, highest, smallest,
               digit, least, top, given: tl.constexpr, like: tl.constexpr, integer: tl.constexpr,
               block: tl.constexpr):  # fmt: skip
    """Round a row of x [width] to codes, with one scale: `static`, or its largest magnitude / largest.

    codes: [batch, per_unit, units], zeros after the last column. x_scale, x_sum: [batch]; NaN if the row has one. like:
    the dtype of the computation, as in `numerics.quant.inputs.round_inputs`. smallest, digit: the smallest normal
    number of 8-bit floats, and the last digit of 1. least: the scale of a row of zeros; top: the largest scale.
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
    total = tl.zeros([block], tl.int32)
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
        if integer:
            total += ratio.to(tl.int32)
        place = m * per_unit * units + (at % per_unit) * units + at // per_unit
        tl.store(codes + place, ratio.to(codes.dtype.element_ty), mask=at < units * per_unit)
    known = tl.max(unknown, axis=0) == 0
    tl.store(x_scale + m, tl.where(known, scale, float("nan")))
    if integer:
        tl.store(x_sum + m, tl.sum(total, axis=0))
