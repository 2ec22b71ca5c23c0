"""Dense bit streams: unsigned codes of 1 to 8 bits packed into int32 words, least-significant bit first.

32 consecutive codes fill exactly `bits` words; codes may cross word borders (3, 5, 6, 7 bits). This is the layout of
compressed-tensors' `weight_packed` (along the last axis) and `weight_zero_point` (along the first).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Int
from torch import Tensor


def packed_width(count: int, bits: int) -> int:
    """int32 words that `count` codes of `bits` bits take."""
    return math.ceil(count * bits / 32)


def pack(codes: Int[Tensor, "*rows n"], bits: int) -> Int[Tensor, "*rows words"]:
    """Pack unsigned codes along the last axis; the stream is filled up with zero bits to whole words."""
    count = codes.shape[-1]
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -count % 32))
    lead, blocks = codes.shape[:-1], codes.shape[-1] // 32
    if 8 % bits == 0:
        per_byte = 8 // bits
        codes = codes.reshape(*lead, blocks * 32 // per_byte, per_byte)
        stream = codes[..., 0].clone(memory_format=torch.contiguous_format)  # may be a transpose
        for j in range(1, per_byte):
            stream |= codes[..., j] << (bits * j)
        words = stream.view(torch.int32)
    else:
        codes = codes.reshape(*lead, blocks, 32).to(torch.int64)
        wide = torch.zeros(*lead, blocks, bits + 1, dtype=torch.int64, device=codes.device)
        for j in range(32):
            word, offset = divmod(j * bits, 32)
            shifted = codes[..., j] << offset
            wide[..., word] |= shifted & 0xFFFFFFFF
            wide[..., word + 1] |= shifted >> 32
        words = _as_int32(wide[..., :bits]).reshape(*lead, blocks * bits)
    return words[..., : packed_width(count, bits)].contiguous()


def unpack(words: Int[Tensor, "*rows words"], bits: int, count: int) -> Int[Tensor, "*rows n"]:
    """The first `count` unsigned codes (uint8) of each packed row."""
    lead = words.shape[:-1]
    if 8 % bits == 0:
        # a dimension of one element may have any stride and still count as contiguous
        words = words if words.stride(-1) == 1 else words.clone(memory_format=torch.contiguous_format)
        stream = words.contiguous().view(torch.uint8)
        if bits < 8:
            mask = 2**bits - 1
            stream = torch.stack([(stream >> (bits * j)) & mask for j in range(8 // bits)], dim=-1)
        return stream.reshape(*lead, -1)[..., :count]
    words = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits))
    blocks = words.shape[-1] // bits
    wide = words.reshape(*lead, blocks, bits).to(torch.int64) & 0xFFFFFFFF
    codes = torch.empty(*lead, blocks, 32, dtype=torch.uint8, device=words.device)
    for j in range(32):
        word, offset = divmod(j * bits, 32)
        value = wide[..., word] >> offset
        if offset + bits > 32:
            value = value | (wide[..., word + 1] << (32 - offset))
        codes[..., j] = (value & (2**bits - 1)).to(torch.uint8)
    return codes.reshape(*lead, -1)[..., :count]


def _as_int32(values: Int[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """Unsigned 32-bit values held in int64, as the int32 of the same bits."""
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)
