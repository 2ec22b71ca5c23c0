"""Block types of 256 weights whose scales are integers (llama.cpp, ggml-common.h: block_q2_K to block_iq4_xs).

A block consists of 16 groups of 16 weights (Q2_K, Q3_K, Q6_K), or 8 groups of 32 (Q4_K, Q5_K, IQ4_XS). The integers sc
and m of its groups are multiplied by the float16 numbers d and dmin of the block.

    Q2_K   16 bytes: sc (lower half) and m of each group; 64 bytes qs; d; dmin        w = d * sc * q - dmin * m
    Q3_K   32 bytes hmask with bit 2 of the codes; 64 bytes qs with bits 0 and 1;
           12 bytes with the 6 bits of sc + 32; d                                     w = d * sc * (q - 4)
    Q4_K   d; dmin; 12 bytes with the 6 bits of sc and m; 128 bytes qs                w = d * sc * q - dmin * m
    Q5_K   as Q4_K, with 32 bytes qh with bit 4 of the codes before qs                w = d * sc * q - dmin * m
    Q6_K   128 bytes ql with bits 0 to 3; 64 bytes qh with bits 4 and 5; 16 signed
           bytes sc; d                                                                w = d * sc * (q - 32)
    IQ4_XS d; uint16 with bits 4 and 5 of sc + 32, from its lowest bits; 4 bytes with
           bits 0 to 3; 128 bytes qs                                                  w = d * sc * level[q]

The places of the codes, for 128 consecutive weights x (each half of a block):
    2 bits (qs of Q2_K and Q3_K, qh of Q6_K): byte l holds x[l], x[l+32], x[l+64], x[l+96] at bits 0, 2, 4, 6
    ql of Q6_K: byte l holds x[l] and x[l+64], byte l + 32 holds x[l+32] and x[l+96], in its lower and upper half
and qs of Q4_K and Q5_K: for each 64 weights x, byte l holds x[l] (lower half) and x[l+32]. Bit k of byte l of hmask and
qh of Q5_K is the high bit of weight 32 k + l of the block. For each 32 weights x, byte l of qs of IQ4_XS holds x[l]
(lower half) and x[l+16].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

from compress.checkpoint.blocks.block import BlockType, half, nibbles
from compress.layers.parts.codes import CodesPart

SIZE = 256


def _pairs(codes: Tensor) -> Tensor:
    """Two bits of each code, four codes in a byte: [..., 256] to [..., 64]."""
    x = codes.unflatten(-1, (2, 4, 32))
    return (x[..., 0, :] | x[..., 1, :] << 2 | x[..., 2, :] << 4 | x[..., 3, :] << 6).flatten(-2)


def _unpaired(packed: Tensor) -> Tensor:
    """The inverse of `_pairs`."""
    x = packed.unflatten(-1, (2, 1, 32))
    return ((x >> _places(packed, 0, 2, 4, 6)[:, None]) & 3).flatten(-3)


def _high(bits: Tensor) -> Tensor:
    """One bit of each code, eight codes in a byte: [..., 256] to [..., 32]."""
    x = bits.unflatten(-1, (8, 32))
    return (x << _places(bits, *range(8))[:, None]).sum(-2).to(torch.uint8)


def _unhigh(packed: Tensor) -> Tensor:
    """The inverse of `_high`."""
    return ((packed[..., None, :] >> _places(packed, *range(8))[:, None]) & 1).flatten(-2)


def _halves(codes: Tensor, apart: int) -> Tensor:
    """Four bits of each code: for each 2 * apart weights, weight l and weight l + apart in a byte."""
    x = codes.unflatten(-1, (-1, 2, apart))
    return nibbles(x[..., 0, :], x[..., 1, :]).flatten(-2)


def _unhalved(packed: Tensor, apart: int) -> Tensor:
    """The inverse of `_halves`."""
    x = packed.unflatten(-1, (-1, apart))
    return torch.stack([x & 15, x >> 4], dim=-2).flatten(-3)


def _places(like: Tensor, *bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.uint8, device=like.device)


@dataclass(frozen=True)
class KQuant(BlockType):
    """A block type of 256 weights."""

    def steps(self, part: CodesPart) -> list[Tensor]:
        """d, and dmin if there are minima, as float16 [out, blocks, 1]."""
        assert part.shared is not None
        kinds = 2 if part.zero is not None else 1
        return list(part.shared.to(torch.float16).view(kinds, part.shape[0], -1, 1).unbind(0))

    def sc(self, part: CodesPart) -> Tensor:
        """The integers of the scales, [out, blocks, groups of a block]."""
        return part.scale.unflatten(-1, (-1, SIZE // self.group))

    def m(self, part: CodesPart) -> Tensor:
        """The integers of the minima."""
        assert part.zero is not None
        return part.zero.unflatten(-1, (-1, SIZE // self.group))

    def tensors(self, sc: Tensor, m: Tensor | None, *steps: Tensor) -> dict[str, Tensor | None]:
        """The tensors of a part from the integers and the float16 steps [out, blocks]."""
        shared = torch.stack(steps).float().flatten()
        zero = None if m is None else m.flatten(1).contiguous()
        return {"scale": sc.flatten(1).contiguous(), "zero": zero, "shared": shared}


class Q2K(KQuant):
    """Q2_K."""

    def fields(self, codes: UInt8[Tensor, "out blocks size"], part: CodesPart) -> list[Tensor]:
        return [nibbles(self.sc(part), self.m(part)), _pairs(codes), *self.steps(part)]

    def read(self, blocks: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, dict[str, Tensor | None]]:
        packed_scales = blocks[..., :16]
        return _unpaired(blocks[..., 16:80]), self.tensors(
            packed_scales & 15, packed_scales >> 4, half(blocks, 80), half(blocks, 82)
        )


class Q3K(KQuant):
    """Q3_K. Byte j of sc: bits 0 to 3 of sc[j] and sc[j+8] in bytes 0 to 7; bits 4 and 5 of sc[b + 4 s] at bit 2 s of
    byte 8 + b."""

    def fields(self, codes: UInt8[Tensor, "out blocks size"], part: CodesPart) -> list[Tensor]:
        sc = (self.sc(part).to(torch.int16) + 32).to(torch.uint8)
        low, top = nibbles(sc[..., :8] & 15, sc[..., 8:] & 15), (sc >> 4).unflatten(-1, (4, 4))
        top = (top << _places(sc, 0, 2, 4, 6)[:, None]).sum(-2).to(torch.uint8)
        return [_high(codes >> 2), _pairs(codes & 3), low, top, *self.steps(part)]

    def read(self, blocks: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, dict[str, Tensor | None]]:
        low, top = blocks[..., 96:104], blocks[..., 104:108]
        top = ((top[..., None, :] >> _places(top, 0, 2, 4, 6)[:, None]) & 3).flatten(-2)
        sc = torch.cat([low & 15, low >> 4], dim=-1) | top << 4
        codes = _unpaired(blocks[..., 32:96]) | _unhigh(blocks[..., :32]) << 2
        return codes, self.tensors((sc.to(torch.int16) - 32).to(torch.int8), None, half(blocks, 108))


class Q45K(KQuant):
    """Q4_K and Q5_K. The 12 bytes: sc[j] in bits 0 to 5 of byte j and m[j] in those of byte j + 4, for j < 4; sc[j + 4]
    and m[j + 4] with bits 0 to 3 in byte 8 + j, and bits 4 and 5 at bits 6 and 7 of bytes j and j + 4."""

    def fields(self, codes: UInt8[Tensor, "out blocks size"], part: CodesPart) -> list[Tensor]:
        sc, m = self.sc(part), self.m(part)
        (sc0, sc1), (m0, m1) = sc.split(4, -1), m.split(4, -1)
        packed = torch.cat([sc0 | (sc1 >> 4) << 6, m0 | (m1 >> 4) << 6, nibbles(sc1 & 15, m1 & 15)], dim=-1)
        high = [_high(codes >> 4)] if self.grid.bits == 5 else []
        return [*self.steps(part), packed, *high, _halves(codes & 15, 32)]

    def read(self, blocks: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, dict[str, Tensor | None]]:
        a, b, c = blocks[..., 4:16].split(4, -1)
        sc = torch.cat([a & 63, c & 15 | (a >> 6) << 4], dim=-1)
        m = torch.cat([b & 63, c >> 4 | (b >> 6) << 4], dim=-1)
        codes = _unhalved(blocks[..., -128:], 32)
        if self.grid.bits == 5:
            codes = codes | _unhigh(blocks[..., 16:48]) << 4
        return codes, self.tensors(sc, m, half(blocks, 0), half(blocks, 2))


class Q6K(KQuant):
    """Q6_K."""

    def fields(self, codes: UInt8[Tensor, "out blocks size"], part: CodesPart) -> list[Tensor]:
        return [_halves(codes & 15, 64), _pairs(codes >> 4), self.sc(part), *self.steps(part)]

    def read(self, blocks: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, dict[str, Tensor | None]]:
        codes = _unhalved(blocks[..., :128], 64) | _unpaired(blocks[..., 128:192]) << 4
        return codes, self.tensors(blocks[..., 192:208].contiguous().view(torch.int8), None, half(blocks, 208))


class IQ4XS(KQuant):
    """IQ4_XS."""

    def fields(self, codes: UInt8[Tensor, "out blocks size"], part: CodesPart) -> list[Tensor]:
        sc = self.sc(part).to(torch.int32) + 32
        top = ((sc >> 4) << (2 * torch.arange(8, device=sc.device))).sum(-1)
        low = nibbles(sc[..., 0::2] & 15, sc[..., 1::2] & 15)
        return [*self.steps(part), torch.stack([top & 255, top >> 8], dim=-1).to(torch.uint8), low, _halves(codes, 16)]

    def read(self, blocks: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, dict[str, Tensor | None]]:
        top = (blocks[..., 2:4, None] >> _places(blocks, 0, 2, 4, 6)) & 3
        low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], dim=-1)
        sc = low.flatten(-2) | top.flatten(-2) << 4
        tensors = self.tensors((sc.to(torch.int16) - 32).to(torch.int8), None, half(blocks, 0))
        return _unhalved(blocks[..., 8:], 16), tensors


K_QUANTS = (
    Q2K("Q2_K", ("uint2_k",), SIZE, 84, 16, 10),
    Q3K("Q3_K", ("int3_k",), SIZE, 110, 16, 12),
    Q45K("Q4_K", ("uint4_k",), SIZE, 144, 32, 15),
    Q45K("Q5_K", ("uint5_k",), SIZE, 176, 32, 17),
    Q6K("Q6_K", ("int6_k",), SIZE, 210, 16, 18),
    IQ4XS("IQ4_XS", ("iq4_xs",), SIZE, 136, 32, 30),
)
