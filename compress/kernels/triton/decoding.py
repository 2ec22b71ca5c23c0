# type: ignore - the language of Triton, in which tensors and constants have no types of Python
"""Decode weights on the GPU, in Triton: words to numbers, and numbers to weights by their scales.

A unit is the shortest run of codes of a row that fills whole words: 8 codes of 4 bits in an int32, 32 of 3 bits in
three, 1 code of 8 bits in a byte. Words are read in complete runs of a row. Codes of 2 and 4 bits
are decoded together, two in a register (`paired`), and the columns of the inputs are reordered (`turned`). For other
bits, a tile of units [rows, units] gives one tile of weights for each place in a unit; the weights at one place of
consecutive units are `per_unit` columns apart.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def numbers(codes, table, kind: tl.constexpr, point: tl.constexpr, direct: tl.constexpr):
    """Return the numbers of unsigned codes, in float32. With `direct` the GPU converts 8-bit floats."""
    if kind == "integer":  # 2^23 + code is the float32 with these bits
        return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + point)
    elif kind == "e2m1":  # the exponent of float16 begins at 2^-14, that of e2m1 at 2^0; subnormal numbers, too
        half = ((codes & 8) << 12) | ((codes & 7) << 9)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif kind == "e4m3":
        if direct:
            return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        half = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)  # at 2^-6
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((codes & 0x7F) == 0x7F, float("nan"), value)
    elif kind == "e5m2":
        return (codes << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.load(table + codes)


@triton.jit
def word_at(words, rows, units, stride, number: tl.constexpr, per_unit_words: tl.constexpr, is_complete: tl.constexpr):
    """Return a word of the units of rows, [rows, units], unsigned.

    Args:
        number: number of the word in its unit.
        is_complete: whether no unit is outside of the row; words outside are 0.
    """
    position = units * per_unit_words + number
    if is_complete:
        word = tl.load(words + rows[:, None] * stride + position[None, :])
    else:
        word = tl.load(words + rows[:, None] * stride + position[None, :], mask=(position < stride)[None, :], other=0)
    return word.to(tl.uint32, bitcast=True) if words.dtype.element_ty == tl.int32 else word


@triton.jit
def code_at(
    words,
    word,
    rows,
    units,
    stride,
    j: tl.constexpr,
    bits: tl.constexpr,
    per_unit: tl.constexpr,
    is_complete: tl.constexpr,
):
    """Return code number j of the units of rows, [rows, units] int32.

    Args:
        word: the first word of the units.
    """
    if per_unit == 1:  # a byte
        return word.to(tl.int32)
    length: tl.constexpr = bits * per_unit // 32
    offset: tl.constexpr = j * bits % 32
    if length > 1:
        word = word_at(words, rows, units, stride, j * bits // 32, length, is_complete)
    code = word >> offset
    if offset + bits > 32:
        code |= word_at(words, rows, units, stride, j * bits // 32 + 1, length, is_complete) << (32 - offset)
    return (code & ((1 << bits) - 1)).to(tl.int32)


@triton.jit
def pair(word, magic, j: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, top: tl.constexpr):
    """Return codes j and j + 16 / bits of words as two 16-bit floats in one register, before their offset or factor
    (`paired`).

    Args:
        magic: for integers, the number with these bits in both halves, to which a code is added; a variable, since an
            instruction takes only one constant.
        top: bits of the mantissa.
    """
    if kind == "integer":
        halves = ((word >> (j * bits)) & (((1 << bits) - 1) * 0x00010001)) | magic.to(tl.uint32)
    else:  # e2m1: the sign, and the three bits from the last one of the exponent on
        sign = (word << (12 - 4 * j)) & 0x80008000
        move: tl.constexpr = top - 1 - 4 * j
        halves = word << move if move >= 0 else word >> -move
        halves = sign | (halves & (7 * 0x00010001 << (top - 1)))
    return halves


@triton.jit
def together(a, b, c, d, e, f, g, h, count: tl.constexpr, like: tl.constexpr):
    """Interleave the halves of `count` registers [rows, units] as [rows, units * 2 count]; those of a register are
    adjacent.
    """
    if count == 4:
        low = tl.join(tl.join(low_of(a), low_of(c)), tl.join(low_of(b), low_of(d)))
        high = tl.join(tl.join(high_of(a), high_of(c)), tl.join(high_of(b), high_of(d)))
    else:
        low = tl.join(
            tl.join(tl.join(low_of(a), low_of(e)), tl.join(low_of(c), low_of(g))),
            tl.join(tl.join(low_of(b), low_of(f)), tl.join(low_of(d), low_of(h))),
        )
        high = tl.join(
            tl.join(tl.join(high_of(a), high_of(e)), tl.join(high_of(c), high_of(g))),
            tl.join(tl.join(high_of(b), high_of(f)), tl.join(high_of(d), high_of(h))),
        )
    return tl.reshape(tl.join(low, high), [a.shape[0], a.shape[1] * 2 * count]).to(like, bitcast=True)


@triton.jit
def low_of(register):
    """Return the lower half of 32 bits."""
    return (register & 0xFFFF).to(tl.uint16)


@triton.jit
def high_of(register):
    """Return the upper half of 32 bits."""
    return (register >> 16).to(tl.uint16)


@triton.jit
def paired(
    word, magic, bits: tl.constexpr, kind: tl.constexpr, point: tl.constexpr, like: tl.constexpr, operand: tl.constexpr
):
    """Return the numbers of the codes of words [rows, units] as [rows, units * 32 / bits], in the order of `turned`
    columns.

    That order keeps the halves of a register adjacent.

    Args:
        like: float16 or bfloat16.
    """
    if kind != "integer" and operand == tl.float32:
        like: tl.constexpr = tl.float16  # Triton's interpreter has no subnormal numbers of bfloat16
    top: tl.constexpr = 10 if like == tl.float16 else 7
    count: tl.constexpr = 16 // bits
    a = pair(word, magic, 0, bits, kind, top)
    b = pair(word, magic, 1, bits, kind, top)
    c = pair(word, magic, 2, bits, kind, top)
    d = pair(word, magic, 3, bits, kind, top)
    e, f, g, h = a, a, a, a
    if count == 8:
        e = pair(word, magic, 4, bits, kind, top)
        f = pair(word, magic, 5, bits, kind, top)
        g = pair(word, magic, 6, bits, kind, top)
        h = pair(word, magic, 7, bits, kind, top)
    value = together(a, b, c, d, e, f, g, h, count, like).to(operand)
    if kind != "integer":
        value = value * (16384.0 if like == tl.float16 else 8.507059173023462e37)  # 2^14, 2^126
    else:
        value = value - ((1 << top) + point)
    return value


@triton.jit
def turned(tile, inverse: tl.constexpr, per_unit: tl.constexpr):
    """Reorder the columns of each unit of a tile as in `paired`: alternate between both halves of a word.

    Args:
        tile: [rows, columns].
        inverse: whether to restore the original order.
    """
    half: tl.constexpr = per_unit // 2
    units: tl.constexpr = tile.shape[1] // per_unit
    split = tl.reshape(tile, [tile.shape[0], units, half, 2] if inverse else [tile.shape[0], units, 2, half])
    return tl.reshape(tl.permute(split, (0, 1, 3, 2)), [tile.shape[0], units * per_unit])


@triton.jit
def spread(per_unit_values, per_unit: tl.constexpr):
    """Repeat values of units [rows, units] for each of their columns."""
    rows: tl.constexpr = per_unit_values.shape[0]
    units: tl.constexpr = per_unit_values.shape[1]
    return tl.reshape(tl.broadcast_to(per_unit_values[:, :, None], [rows, units, per_unit]), [rows, units * per_unit])


@triton.jit
def scale_at(
    scale,
    zero,
    shared,
    index,
    rows,
    columns,
    width,
    group,
    stride,
    scale_kind: tl.constexpr,
    zero_kind: tl.constexpr,
    group_kind: tl.constexpr,
):
    """Return the scale and zero point (or minimum, or 0) of the weights of rows in columns, [rows, columns] float32."""
    columns = tl.minimum(columns, width - 1)
    if group_kind == "index":
        groups = tl.load(index + columns)
    elif group_kind == "run":
        groups = columns // group
    else:
        groups = columns * 0
    position = rows[:, None] * stride + groups[None, :]
    step = tl.load(scale + position)
    if scale_kind == "e8m0":  # a byte is the exponent of a float32; 2^-127 is a subnormal number
        bits = step.to(tl.int32)
        step = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
    elif scale_kind == "e4m3":
        step = tl.div_rn(numbers(step.to(tl.int32), shared, "e4m3", 0, False), tl.load(shared))
    step = step.to(tl.float32)
    low = tl.zeros_like(step) if zero_kind == "none" else tl.load(zero + position).to(tl.float32)
    return step, low


@triton.jit
def times_scale(value, step, low, zero_kind: tl.constexpr, exact: tl.constexpr):
    """Return the weights of numbers.

    Args:
        exact: whether scales were converted to the dtype of the numbers.
    """
    if exact:
        weight = value * step
    else:
        weight = value.to(tl.float32)
        if zero_kind == "point":
            weight -= low
        weight *= step
        if zero_kind == "minimum":
            weight += low
    return weight


@triton.jit
def values_at(
    words,
    word,
    table,
    magic,
    n,
    u,
    is_inside,
    stride,
    j: tl.constexpr,
    like: tl.constexpr,
    bits: tl.constexpr,
    per_unit: tl.constexpr,
    kind: tl.constexpr,
    point: tl.constexpr,
    turn: tl.constexpr,
    direct: tl.constexpr,
    native: tl.constexpr,
    is_complete: tl.constexpr,
    operand: tl.constexpr,
    codes: tl.constexpr,
):
    """Return the numbers [rows of W, columns] of all codes of units, or of those at place j.

    Args:
        codes: dtype of codes that are multiplied natively.
    """
    if turn:
        value = paired(word, magic, bits, kind, point, like, operand)
    else:
        code = code_at(words, word, n, u, stride, j, bits, per_unit, is_complete)
        if native and kind == "integer":
            value = (code - point).to(tl.int8)
        elif native:
            value = tl.where(is_inside[None, :], code, 0).to(tl.uint8).to(codes, bitcast=True)
        elif kind == "e4m3" or kind == "e5m2":  # codes after the last column may be NaN
            value = tl.where(is_inside[None, :], numbers(code, table, kind, point, direct), 0.0)
        else:
            value = numbers(code, table, kind, point, direct)
    return value


@triton.jit
def unit_scales(
    scale,
    zero,
    shared,
    index,
    n,
    u,
    width,
    group,
    stride,
    per_unit: tl.constexpr,
    wide: tl.constexpr,
    operand: tl.constexpr,
    single: tl.constexpr,
    scale_kind: tl.constexpr,
    zero_kind: tl.constexpr,
    group_kind: tl.constexpr,
):
    """Return `scale_at` for units whose columns have one scale.

    Args:
        wide: whether to repeat it for each column.
        single: whether scales are converted to `operand`.
    """
    step, low = scale_at(
        scale, zero, shared, index, n, u * per_unit, width, group, stride, scale_kind, zero_kind, group_kind
    )
    if single:
        step = step.to(operand)
    if wide:
        step, low = spread(step, per_unit), spread(low, per_unit)
    return step, low


@triton.jit
def lifted(
    word,
    table,
    low_one,
    high_one,
    j: tl.constexpr,
    bits: tl.constexpr,
    kind: tl.constexpr,
    by_pairs: tl.constexpr,
    direct: tl.constexpr,
):
    """Return the number of code j of words in float32; for integers, the code plus `lift`, with one mask and one shift.

    Args:
        low_one: bits of `lift` of even codes; a variable, since an instruction takes only one constant.
        high_one: bits of `lift` of odd codes.
        by_pairs: whether one shift serves two codes, where the one of even j is lower in the mantissa.
    """
    if kind == "integer":
        low: tl.constexpr = by_pairs and j % 2 == 0
        lowest_bit: tl.constexpr = 23 - 2 * bits if low else 23 - bits
        right_shift: tl.constexpr = j * bits - lowest_bit
        shifted = word >> right_shift if right_shift >= 0 else word << -right_shift
        return ((shifted & (((1 << bits) - 1) << lowest_bit)) | (low_one if low else high_one)).to(
            tl.float32, bitcast=True
        )
    return numbers(((word >> (j * bits)) & ((1 << bits) - 1)).to(tl.int32), table, kind, 0, direct)


@triton.jit
def lift(j: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, by_pairs: tl.constexpr):
    """Return what `lifted` adds to code j."""
    return 0 if kind != "integer" else 1 << (2 * bits if by_pairs and j % 2 == 0 else bits)


@triton.jit
def column(tile, j: tl.constexpr):
    """Return column j of a tile [rows, columns], whose columns are a power of two and in the registers of a thread."""
    for level in tl.static_range(5):
        if tile.shape[1] > 1:
            even, odd = tl.split(tl.reshape(tile, [tile.shape[0], tile.shape[1] // 2, 2]))
            tile = even if (j >> level) % 2 == 0 else odd
    return tl.reshape(tile, [tile.shape[0]])
