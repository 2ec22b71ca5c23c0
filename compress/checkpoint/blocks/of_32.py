"""Block types of 32 weights with one scale (llama.cpp, ggml-common.h: block_q4_0 to block_q8_0, iq4_nl and mxfp4).

Q4_0   d float16; 16 bytes: byte j holds the codes of weights j (lower half) and j + 16    w = d * (q - 8)
Q4_1   d, m float16; 16 bytes                                                              w = d * q + m
Q5_0   d float16; uint32 with bit 4 of the 32 codes; 16 bytes with bits 0 to 3             w = d * (q - 16)
Q5_1   d, m float16; uint32; 16 bytes                                                      w = d * q + m
Q8_0   d float16; 32 signed bytes                                                          w = d * q
IQ4_NL as Q4_0                                                                             w = d * level[q]
MXFP4  e, an exponent in a byte; 16 bytes as Q4_0                                          w = 2^(e - 127) * E2M1(q)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

from compress.checkpoint.blocks.block import BlockType, half, nibbles
from compress.layers.parts.codes import CodesPart

SIZE = 32


@dataclass(frozen=True)
class Of32(BlockType):
    """A block type of 32 weights. bits: of a code. minimum: whether a block has a minimum."""

    bits: int
    minimum: bool = False

    def fields(self, codes: UInt8[Tensor, "out blocks size"], part: CodesPart) -> list[Tensor]:
        fields = [part.scale.to(torch.float16)]
        if self.minimum:
            assert part.zero is not None
            fields.append(part.zero.to(torch.float16))
        fields = [field.unsqueeze(-1).contiguous() for field in fields]
        if self.bits == 8:
            return [*fields, codes ^ 0x80]  # q = code - 128 as a signed byte
        if self.bits == 5:
            place = torch.arange(SIZE, device=codes.device)
            fields.append(
                ((codes >> 4).long() << place)
                .sum(-1)
                .to(torch.int64)
                .view(torch.uint8)
                .unflatten(-1, (-1, 8))[..., :4]
                .contiguous()
            )
        low = codes & 15
        return [*fields, nibbles(low[..., :16], low[..., 16:])]

    def read(self, blocks: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, dict[str, Tensor | None]]:
        tensors: dict[str, Tensor | None] = {"scale": half(blocks, 0)}
        at = 2
        if self.minimum:
            tensors["zero"], at = half(blocks, 2), 4
        if self.bits == 8:
            return blocks[..., at:] ^ 0x80, tensors
        codes = torch.cat([blocks[..., -16:] & 15, blocks[..., -16:] >> 4], dim=-1)
        if self.bits == 5:
            place = torch.arange(8, dtype=torch.uint8, device=blocks.device)
            high = (blocks[..., at : at + 4, None] >> place) & 1
            codes = codes | (high.flatten(-2) << 4)
        return codes, tensors


@dataclass(frozen=True)
class Microscaling(BlockType):
    """32 floats of 4 bits with one exponent, whose byte is that of the checkpoint (OCP Microscaling 1.0)."""

    def fields(self, codes: UInt8[Tensor, "out blocks size"], part: CodesPart) -> list[Tensor]:
        return [part.scale.unsqueeze(-1).contiguous(), nibbles(codes[..., :16], codes[..., 16:])]

    def read(self, blocks: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, dict[str, Tensor | None]]:
        codes = torch.cat([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], dim=-1)
        return codes, {"scale": blocks[..., 0].contiguous()}


OF_32 = (
    Of32("Q4_0", ("int4_signed", "int4"), SIZE, 18, SIZE, 2, bits=4),
    Of32("Q4_1", ("uint4",), SIZE, 20, SIZE, 3, bits=4, minimum=True),
    Of32("Q5_0", ("int5_signed", "int5"), SIZE, 22, SIZE, 8, bits=5),
    Of32("Q5_1", ("uint5",), SIZE, 24, SIZE, 9, bits=5, minimum=True),
    Of32("Q8_0", ("int8",), SIZE, 34, SIZE, 7, bits=8),
    Of32("IQ4_NL", ("iq4_nl",), SIZE, 18, SIZE, 25, bits=4),
    Microscaling("MXFP4", ("mxfp4",), SIZE, 17, SIZE, 38),
)
