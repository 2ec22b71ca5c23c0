"""Dense bit streams: unsigned codes of 1 to 8 bits packed into int32 words, least-significant bit first.

32 consecutive codes fill exactly `bits` words. Codes of 3, 5, 6 and 7 bits may cross byte and word boundaries. This is
the layout of compressed-tensors' `weight_packed` (along the last axis) and `weight_zero_point` (along the first).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Int
from torch import Tensor


def packed_width(count: int, bits: int) -> int:
    """Return the number of int32 words that `count` codes of `bits` bits take."""
    return math.ceil(count * bits / 32)


def whole_words(bits: int) -> int:
    """Return the smallest number of codes of `bits` bits that fills int32 words: 8 for 4 bits, 32 for 3."""
    return math.lcm(bits, 32) // bits


def _unit(bits: int) -> tuple[int, int]:
    """Return (codes, bytes) of the shortest piece of the stream that ends at a byte boundary: (8, 3) for 3 bits."""
    length = math.lcm(bits, 8)
    return length // bits, length // 8


def pack(codes: Int[Tensor, "*rows n"], bits: int) -> Int[Tensor, "*rows words"]:
    """Pack unsigned codes along the last axis; zero bits fill the last word."""
    lead, count = codes.shape[:-1], codes.shape[-1]
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -count % 32))
    per_unit, size = _unit(bits)
    columns = codes.reshape(*lead, -1, per_unit).unbind(-1)
    stream = [torch.zeros_like(columns[0], memory_format=torch.contiguous_format) for _ in range(size)]
    for j, code in enumerate(columns):
        byte, offset = divmod(j * bits, 8)
        stream[byte] |= code << offset  # bits above the byte are cut off
        if offset + bits > 8:
            stream[byte + 1] |= code >> (8 - offset)
    words = torch.stack(stream, dim=-1).reshape(*lead, -1).view(torch.int32)
    return words[..., : packed_width(count, bits)].contiguous()


def unpack(words: Int[Tensor, "*rows words"], bits: int, count: int) -> Int[Tensor, "*rows n"]:
    """Return the first `count` unsigned codes (uint8) of each packed row."""
    lead = words.shape[:-1]
    per_unit, size = _unit(bits)
    if size > 1:
        words = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits))
    # a dimension of one element may have any stride and still count as contiguous
    words = words if words.stride(-1) == 1 else words.clone(memory_format=torch.contiguous_format)
    stream = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stream[..., :count]
    columns = [part.contiguous() for part in stream.reshape(*lead, stream.shape[-1] // size, size).unbind(-1)]
    codes = []
    for j in range(per_unit):
        byte, offset = divmod(j * bits, 8)
        code = columns[byte] >> offset
        if offset + bits > 8:
            code |= columns[byte + 1] << (8 - offset)
        codes.append(code.bitwise_and_(2**bits - 1))
    return torch.stack(codes, dim=-1).flatten(-2)[..., :count]
