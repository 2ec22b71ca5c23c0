"""Block types of 256 weights whose runs are entries of a codebook (llama.cpp, ggml-common.h: block_iq3_s and others).

An integer s of 4 bits scales 32 weights (IQ3_S, IQ3_XXS, IQ2_XXS) or 16 (IQ2_XS, IQ2_S). i is the index of an entry,
for 4 weights (3 bits) or 8 (2 bits). Signs are a bit for each weight, from its lowest bits, set for minus. `parity`
stands for the signs of eight weights without the last one, which makes the number of minus signs even.

    IQ3_S    d; 64 bytes bits 0 to 7 of i; 8 bytes bit 8 of i; 32 bytes signs;
             4 bytes s, of two groups each                                        w = d * (2 s + 1) * level
    IQ3_XXS  d; 64 bytes i; 8 uint32, of 32 weights each: 4 times parity, 7 bits
             each, then s                                                         w = d * (s + 1/2) / 2 * level
    IQ2_XXS  d; 8 times: 4 bytes i, then a uint32 as in IQ3_XXS                   w = d * (s + 1/2) / 4 * level
    IQ2_XS   d; 32 uint16: i in 9 bits, then parity; 8 bytes s                    w = d * (s + 1/2) / 4 * level
    IQ2_S    d; 32 bytes bits 0 to 7 of i; 32 bytes signs; 8 bytes bits 8 and 9
             of i, of four runs each; 8 bytes s                                   w = d * (s + 1/2) / 4 * level

The levels of our grids are those of llama.cpp, divided by 4 (IQ3_XXS) or 8 (2 bits), so that scales are d * (2 s + 1).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from compress.checkpoint.blocks.block import BlockType, half, nibbles
from compress.layers.parts.codes import CodesPart
from compress.numerics.quant.codebooks import UNIT, Codebook
from compress.numerics.quant.grids import RunGrid

SIZE = 256


def _bytes(bits: Int[Tensor, "*any 8"]) -> UInt8[Tensor, "*any"]:
    """Eight bits as a byte, from the lowest."""
    return (bits.to(torch.int32) << torch.arange(8, device=bits.device)).sum(-1).to(torch.uint8)


def _bits(packed: UInt8[Tensor, "*any"], count: int = 8) -> Int[Tensor, "*any count"]:
    """The inverse of `_bytes`; `count` fields of equal size."""
    size = 8 // count
    return (packed.to(torch.int32)[..., None] >> torch.arange(0, 8, size, device=packed.device)) & ((1 << size) - 1)


def _little_endian(words: Int[Tensor, "*any"], count: int) -> UInt8[Tensor, "*any count"]:
    """Integers as `count` bytes each."""
    return ((words[..., None] >> (8 * torch.arange(count, device=words.device))) & 255).to(torch.uint8)


def _words(packed: UInt8[Tensor, "*any bytes"], count: int) -> Int[Tensor, "*any words"]:
    """The inverse of `_little_endian`."""
    parts = packed.unflatten(-1, (-1, count)).to(torch.int64)
    return (parts << (8 * torch.arange(count, device=packed.device))).sum(-1)


@dataclass(frozen=True)
class IQuant(BlockType):
    """A block type whose runs are entries of a codebook."""

    @property
    def codebook(self) -> Codebook:
        """The codebook of the grid."""
        assert isinstance(self.grid, RunGrid)
        return self.grid.codebook

    def fields(self, codes: UInt8[Tensor, "out blocks size"], part: CodesPart) -> list[Tensor]:
        assert part.shared is not None
        levels, book = len(self.codebook.magnitudes), self.codebook
        negative = codes < levels
        codes = codes.to(torch.int32)
        runs = torch.where(negative, levels - 1 - codes, codes - levels).unflatten(-1, (-1, book.length))
        signs = negative.unflatten(-1, (-1, UNIT))
        if not bool(book.holds(runs).all()) or (book.even and bool((signs.sum(-1) % 2).any())):
            raise ValueError(f"the weight has runs that the codebook of {self.name} does not have")
        step = part.shared.to(torch.float16).view(part.shape[0], -1, 1)
        s = (part.scale.unflatten(-1, (-1, SIZE // self.group)) - 1) // 2
        return [step, *self.packed(book.index(runs), _bytes(signs), s)]

    def read(self, blocks: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, dict[str, Tensor | None]]:
        index, signs, s = self.unpacked(blocks[..., 2:])
        negative = _bits(signs).flatten(-2)
        if self.codebook.even:  # the last sign of eight follows from the others
            units = negative.unflatten(-1, (-1, UNIT))
            negative = torch.cat([units[..., :-1], units[..., :-1].sum(-1, keepdim=True) % 2], -1).flatten(-2)
        level = self.codebook.entries().to(blocks.device)[index.long()].flatten(-2)
        levels = len(self.codebook.magnitudes)
        codes = torch.where(negative == 1, levels - 1 - level, levels + level).to(torch.uint8)
        scale = (2 * s + 1).to(torch.uint8).flatten(1).contiguous()
        return codes, {"scale": scale, "zero": None, "shared": half(blocks, 0).float().flatten()}

    @abstractmethod
    def packed(self, index: Tensor, signs: UInt8[Tensor, "out blocks units"], s: Tensor) -> list[Tensor]:
        """Return the fields after d."""

    @abstractmethod
    def unpacked(self, fields: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (index, signs, s) of the fields after d; an even codebook leaves the last sign of eight undefined."""


class IQ3S(IQuant):
    """IQ3_S."""

    def packed(self, index: Tensor, signs: UInt8[Tensor, "out blocks units"], s: Tensor) -> list[Tensor]:
        high = _bytes((index >> 8).unflatten(-1, (-1, 8)))
        return [(index & 255).to(torch.uint8), high, signs, nibbles(s[..., 0::2], s[..., 1::2])]

    def unpacked(self, fields: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, Tensor, Tensor]:
        low, high, signs, s = fields.split([64, 8, 32, 4], -1)
        return low.to(torch.int32) | _bits(high).flatten(-2) << 8, signs, _bits(s, 2).flatten(-2)


class IQ3XXS(IQuant):
    """IQ3_XXS."""

    def packed(self, index: Tensor, signs: UInt8[Tensor, "out blocks units"], s: Tensor) -> list[Tensor]:
        return [index.to(torch.uint8), _little_endian(_with_parity(signs, s), 4)]

    def unpacked(self, fields: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, Tensor, Tensor]:
        return fields[..., :64], *_of_parity(_words(fields[..., 64:], 4))


class IQ2XXS(IQuant):
    """IQ2_XXS."""

    def packed(self, index: Tensor, signs: UInt8[Tensor, "out blocks units"], s: Tensor) -> list[Tensor]:
        words = _little_endian(_with_parity(signs, s), 4)
        return [torch.cat([index.to(torch.uint8).unflatten(-1, (-1, 4)), words], -1)]

    def unpacked(self, fields: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, Tensor, Tensor]:
        index, words = fields.unflatten(-1, (-1, 8)).split([4, 4], -1)
        return index.flatten(-2), *_of_parity(_words(words.flatten(-2), 4))


class IQ2XS(IQuant):
    """IQ2_XS."""

    def packed(self, index: Tensor, signs: UInt8[Tensor, "out blocks units"], s: Tensor) -> list[Tensor]:
        words = index.to(torch.int32) | (signs & 127).to(torch.int32) << 9
        return [_little_endian(words, 2), nibbles(s[..., 0::2], s[..., 1::2])]

    def unpacked(self, fields: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, Tensor, Tensor]:
        words, s = _words(fields[..., :64], 2), fields[..., 64:]
        return words & 511, (words >> 9).to(torch.uint8), _bits(s, 2).flatten(-2)


class IQ2S(IQuant):
    """IQ2_S."""

    def packed(self, index: Tensor, signs: UInt8[Tensor, "out blocks units"], s: Tensor) -> list[Tensor]:
        places = 2 * torch.arange(4, device=index.device)
        high = ((index >> 8).unflatten(-1, (-1, 4)) << places).sum(-1).to(torch.uint8)
        return [(index & 255).to(torch.uint8), signs, high, nibbles(s[..., 0::2], s[..., 1::2])]

    def unpacked(self, fields: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, Tensor, Tensor]:
        low, signs, high, s = fields.split([32, 32, 8, 8], -1)
        return low.to(torch.int32) | _bits(high, 4).flatten(-2) << 8, signs, _bits(s, 2).flatten(-2)


def _with_parity(signs: UInt8[Tensor, "out blocks units"], s: Tensor) -> Int[Tensor, "out blocks groups"]:
    """Four times the first seven signs of a unit, then s in bits 28 to 31."""
    places = 7 * torch.arange(4, device=signs.device)
    return ((signs & 127).to(torch.int64).unflatten(-1, (-1, 4)) << places).sum(-1) | s.to(torch.int64) << 28


def _of_parity(words: Int[Tensor, "out blocks groups"]) -> tuple[Tensor, Tensor]:
    """The inverse of `_with_parity`."""
    signs = (words[..., None] >> (7 * torch.arange(4, device=words.device))) & 127
    return signs.flatten(-2).to(torch.uint8), words >> 28


I_QUANTS = (
    IQ3S("IQ3_S", ("iq3_s",), SIZE, 110, 32, 26),
    IQ3XXS("IQ3_XXS", ("iq3_xxs",), SIZE, 98, 32, 23),
    IQ2S("IQ2_S", ("iq2_s",), SIZE, 82, 16, 28),
    IQ2XS("IQ2_XS", ("iq2_xs",), SIZE, 74, 16, 20),
    IQ2XXS("IQ2_XXS", ("iq2_xxs",), SIZE, 66, 32, 19),
)
