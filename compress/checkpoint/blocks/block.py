"""BlockType: the contract of the block types of GGUF files.

A row of a weight is divided into blocks of consecutive weights. A block holds the codes of its weights and all numbers
of its scales, so that the bytes of a row follow from its width. All numbers are little-endian.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.numerics.quant.bits import pack, unpack
from compress.numerics.quant.grids import GRIDS, Grid


@dataclass(frozen=True)
class BlockType(ABC):
    """A block type.

    name: in llama.cpp. grids: the grids whose codes it stores; `decode` returns codes of the first one. size: weights
    of a block. size_bytes: bytes of a block. group: columns that share a scale. file_type: the number of a file whose
    weights have mostly this type (`general.file_type`).
    """

    name: str
    grids: tuple[str, ...]
    size: int
    size_bytes: int
    group: int
    file_type: int

    @property
    def grid(self) -> Grid:
        """The grid of the codes that are read."""
        return GRIDS[self.grids[0]]

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, with scales."""
        return 8 * self.size_bytes / self.size

    def row_bytes(self, width: int) -> int:
        """The bytes of a row."""
        return width // self.size * self.size_bytes

    def scheme(self) -> CodesScheme:
        """The scheme of the codes that are read."""
        return CodesScheme(self.grid, self.group, symmetric=not self.grid.offset)

    def encode(self, part: CodesPart) -> UInt8[Tensor, "out bytes"]:
        """Return the blocks of a weight, row by row."""
        rows, width = part.shape
        codes = unpack(part.words, part.grid.bits, width).view(rows, width // self.size, self.size)
        fields = self.fields(codes, part)
        block_bytes = torch.cat([field.reshape(rows, codes.shape[1], -1).view(torch.uint8) for field in fields], dim=-1)
        assert block_bytes.shape[-1] == self.size_bytes
        return block_bytes.reshape(rows, -1)

    def decode(self, blocks: UInt8[Tensor, "out bytes"], width: int, grid: Grid | None = None) -> CodesPart:
        """The codes of a weight; the exact inverse of `encode`. grid: one of `grids`."""
        rows, grid = blocks.shape[0], grid or self.grid
        blocks = blocks.reshape(rows, width // self.size, self.size_bytes)
        codes, tensors = self.read(blocks)
        words = pack(codes.reshape(rows, width).to(torch.uint8), grid.bits)
        scheme = CodesScheme(grid, self.group, symmetric=not grid.offset)
        return CodesPart(scheme, (rows, width), {"words": words, **tensors})

    @abstractmethod
    def fields(self, codes: UInt8[Tensor, "out blocks size"], part: CodesPart) -> list[Tensor]:
        """The fields of all blocks in the order of their bytes, [out, blocks, ...] each. codes: counted from 0."""

    @abstractmethod
    def read(self, blocks: UInt8[Tensor, "out blocks bytes"]) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The codes, counted from 0, and the other tensors of a `CodesPart`."""


def nibbles(low: Int[Tensor, "*any"], high: Int[Tensor, "*any"]) -> UInt8[Tensor, "*any"]:
    """Bytes with these lower and upper halves."""
    return (low | (high << 4)).to(torch.uint8)


def half(blocks: UInt8[Tensor, "out blocks bytes"], at: int) -> Tensor:
    """The float16 number that begins at byte `at` of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]
