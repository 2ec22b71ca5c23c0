# type: ignore - the language of Triton, in which tensors and constants have no types of Python
"""Decode weights on the GPU, in Triton: words to numbers, and numbers to weights by their scales.

A unit is the shortest run of codes of a row that fills whole words: 8 codes of 4 bits in an int32, 32 of 3 bits in
three, 1 code of 8 bits in a byte. The words are read as they are stored, in whole runs of a row. Codes of 2 and 4 bits
are decoded together, two in a register (`paired`), and the columns of the inputs take their order (`turned`). For other
bits, a tile of units [rows, units] gives one tile of weights for each place in a unit; the weights at one place of
consecutive units are `per_unit` columns apart.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def code_at(
    words, word, rows, units, stride, j: tl.constexpr, bits: tl.constexpr, per_unit: tl.constexpr, whole: tl.constexpr
):
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
    """Codes j and j + 16 / bits of words as 16-bit floats, before their offset or factor (`paired`), in one register.

    top: bits of the mantissa. magic: for integers, the number with these bits in both halves, to which a code is added;
    a variable, since an instruction takes one constant alone.
    """
    if kind == "integer":
        found = ((word >> (j * bits)) & (((1 << bits) - 1) * 0x00010001)) | magic.to(tl.uint32)
    else:  # e2m1: the sign, and the three bits from the last one of the exponent on
        sign = (word << (12 - 4 * j)) & 0x80008000
        move: tl.constexpr = top - 1 - 4 * j
        found = word << move if move >= 0 else word >> -move
        found = sign | (found & (7 * 0x00010001 << (top - 1)))
    return found


@triton.jit
def together(a, b, c, d, e, f, g, h, count: tl.constexpr, like: tl.constexpr):
    """The halves of `count` registers [rows, units] as [rows, units * 2 count], those of a register side by side."""
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
    """The lower half of 32 bits."""
    return (register & 0xFFFF).to(tl.uint16)


@triton.jit
def high_of(register):
    """The upper half of 32 bits."""
    return (register >> 16).to(tl.uint16)


@triton.jit
def paired(
    word, magic, bits: tl.constexpr, kind: tl.constexpr, point: tl.constexpr, like: tl.constexpr, operand: tl.constexpr
):
    """The numbers of the codes of words [rows, units], [rows, units * 32 / bits], in the order of `turned` columns.

    like: float16 or bfloat16. That order leaves the halves of a register next to each other.
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
        found = tl.div_rn(numbers(found.to(tl.int32), shared, "e4m3", 0, False), tl.load(shared))
    found = found.to(tl.float32)
    low = tl.zeros_like(found) if zero_kind == "none" else tl.load(zero + place).to(tl.float32)
    return found, low


@triton.jit
def times_scale(value, each, low, zero_kind: tl.constexpr, exact: tl.constexpr):
    """The weights of numbers. exact: scales were converted to the dtype of the numbers."""
    if exact:
        found = value * each
    else:
        found = value.to(tl.float32)
        if zero_kind == "point":
            found -= low
        found *= each
        if zero_kind == "minimum":
            found += low
    return found


@triton.jit
def values_at(
    words,
    word,
    table,
    magic,
    n,
    u,
    inside,
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
    whole: tl.constexpr,
    operand: tl.constexpr,
    codes: tl.constexpr,
):
    """Numbers [rows of W, columns] of all codes of units, or of those at place j. codes: the dtype of `native` ones."""
    if turn:
        value = paired(word, magic, bits, kind, point, like, operand)
    else:
        code = code_at(words, word, n, u, stride, j, bits, per_unit, whole)
        if native and kind == "integer":
            value = (code - point).to(tl.int8)
        elif native:
            value = tl.where(inside[None, :], code, 0).to(tl.uint8).to(codes, bitcast=True)
        elif kind == "e4m3" or kind == "e5m2":  # what stands after the last column may be NaN
            value = tl.where(inside[None, :], numbers(code, table, kind, point, direct), 0.0)
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
    """`scale_at` for units whose columns have one scale; wide: for each column. single: scales in `operand`."""
    each, low = scale_at(
        scale, zero, shared, index, n, u * per_unit, width, group, stride, scale_kind, zero_kind, group_kind
    )
    if single:
        each = each.to(operand)
    if wide:
        each, low = spread(each, per_unit), spread(low, per_unit)
    return each, low


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
    """The number of code j of words in float32; for integers, the code plus `lift`, which a mask and a shift make.

    by_pairs: one shift serves two codes, and the one of even j stands lower in the mantissa. low_one, high_one: the
    bits of `lift` of both; variables, since an instruction takes one constant alone.
    """
    if kind == "integer":
        low: tl.constexpr = by_pairs and j % 2 == 0
        at: tl.constexpr = 23 - 2 * bits if low else 23 - bits
        right: tl.constexpr = j * bits - at
        moved = word >> right if right >= 0 else word << -right
        return ((moved & (((1 << bits) - 1) << at)) | (low_one if low else high_one)).to(tl.float32, bitcast=True)
    return numbers(((word >> (j * bits)) & ((1 << bits) - 1)).to(tl.int32), table, kind, 0, direct)


@triton.jit
def lift(j: tl.constexpr, bits: tl.constexpr, kind: tl.constexpr, by_pairs: tl.constexpr):
    """What `lifted` adds to code j."""
    return 0 if kind != "integer" else 1 << (2 * bits if by_pairs and j % 2 == 0 else bits)


@triton.jit
def column(tile, j: tl.constexpr):
    """Column j of a tile [rows, columns], whose columns are a power of two and in the registers of a thread."""
    for level in tl.static_range(5):
        if tile.shape[1] > 1:
            even, odd = tl.split(tl.reshape(tile, [tile.shape[0], tile.shape[1] // 2, 2]))
            tile = even if (j >> level) % 2 == 0 else odd
    return tl.reshape(tile, [tile.shape[0]])
