"""Packed codes: `Codes` with the codes as a dense bit stream, the form that layers hold and layouts store."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.bits import pack, unpack
from compress.numerics.codes import Codes, GroupSize, store
from compress.numerics.grids import Grid, IntGrid


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """A quantized weight of `shape` (out, in) with its codes packed along the input axis.

    words: [out, ceil(in * bits / 32)] int32 (codes counted from 0 up). scale: [out, groups]. zero: int8 like scale,
    or None. group_index: [in] int32 or None.
    """

    words: Int[Tensor, "out words"]
    scale: Float[Tensor, "out groups"]
    zero: Int[Tensor, "out groups"] | None
    grid: Grid
    group_size: GroupSize
    shape: tuple[int, int]
    group_index: Int[Tensor, " in"] | None = None

    @classmethod
    def of(cls, codes: Codes) -> PackedCodes:
        """Pack; exact in both directions."""
        words = pack(codes.codes.to(torch.int16) - _lowest(codes.grid), codes.grid.bits)
        zero = None if codes.zero is None else codes.zero.to(torch.int8)
        return cls(words, codes.scale, zero, codes.grid, codes.group_size, codes.shape, codes.group_index)

    def codes(self) -> Codes:
        """Unpack."""
        unsigned = unpack(self.words, self.grid.bits, self.shape[1])
        codes = store(unsigned.to(torch.int16) + _lowest(self.grid), self.grid)
        zero = None if self.zero is None else self.zero.to(self.scale.dtype)
        return Codes(codes, self.scale, zero, self.grid, self.group_size, self.group_index)

    def sha256(self) -> str:
        """A digest of codes, scales and zero points: two packed weights are bit-identical exactly if it is equal."""
        digest = hashlib.sha256(f"{self.grid.name} {self.group_size} {self.shape}".encode())
        for tensor in (self.words, self.scale, self.zero, self.group_index):
            if tensor is not None:
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _lowest(grid: Grid) -> int:
    """The smallest stored code: integers are signed, table indexes and bit patterns are not."""
    return grid.lowest if isinstance(grid, IntGrid) else 0
