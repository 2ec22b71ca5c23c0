"""Packed codes: `Codes` with the codes as a dense bit stream, the form that layers hold and layouts store."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from compress.numerics.bits import pack, packed_width, unpack
from compress.numerics.codes import Codes, GroupSize, groups_in, store
from compress.numerics.grids import Grid, IntGrid


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """A quantized weight of `shape` (out, in) with its codes packed along the input axis.

    words: [out, ceil(in * bits / 32)] int32 (codes counted from 0 up). scale: [out, groups], as it is stored:
    floats, or uint8 where the grid says so. zero: int8 like scale, or None. group_index: [in] int32 or None.
    shared: [n] float32 or None, what the stored scales have in common.
    """

    words: Int[Tensor, "out words"]
    scale: Shaped[Tensor, "out groups"]
    zero: Int[Tensor, "out groups"] | None
    grid: Grid
    group_size: GroupSize
    shape: tuple[int, int]
    group_index: Int[Tensor, " in"] | None = None
    shared: Float[Tensor, " n"] | None = None

    @classmethod
    def of(cls, codes: Codes) -> PackedCodes:
        """Pack; exact in both directions."""
        grid = codes.grid
        words = pack(codes.codes.to(torch.int16) - _lowest(grid), grid.bits)
        zero = None if codes.zero is None else codes.zero.to(torch.int8)
        scale = grid.scaling.encode(codes.scale, codes.shared)
        return cls(words, scale, zero, grid, codes.group_size, codes.shape, codes.group_index, codes.shared)

    @classmethod
    def empty(
        cls, grid: Grid, group_size: GroupSize, shape: tuple[int, int], symmetric: bool, indexed: bool,
        storage: torch.dtype,
    ) -> PackedCodes:  # fmt: skip
        """Tensors of the right shapes and dtypes without values, for counting bytes."""
        meta = torch.device("meta")
        rows, width = shape
        scales = 1 if group_size == "tensor" else rows, groups_in(width, group_size)
        count = grid.scaling.shares(math.prod(scales))
        return cls(
            torch.empty(rows, packed_width(width, grid.bits), dtype=torch.int32, device=meta),
            torch.empty(scales, dtype=grid.scaling.stored or storage, device=meta),
            None if symmetric else torch.empty(scales, dtype=torch.int8, device=meta),
            grid, group_size, shape,
            torch.empty(width, dtype=torch.int32, device=meta) if indexed else None,
            torch.empty(count, dtype=torch.float32, device=meta) if count else None,
        )  # fmt: skip

    def codes(self) -> Codes:
        """Unpack."""
        unsigned = unpack(self.words, self.grid.bits, self.shape[1])
        codes = store(unsigned.to(torch.int16) + _lowest(self.grid), self.grid)
        scale = self.scales()
        zero = None if self.zero is None else self.zero.to(scale.dtype)
        return Codes(codes, scale, zero, self.grid, self.group_size, self.group_index, self.shared)

    def scales(self) -> Float[Tensor, "out groups"]:
        """The scales as numbers."""
        return self.grid.scaling.decode(self.scale, self.shared)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scales as numbers."""
        return self.scale.dtype if self.grid.scaling.stored is None else torch.float32

    def in_storage(self, dtype: torch.dtype) -> PackedCodes:
        """The same with scales that are stored as floats in `dtype`; exact where they were fitted for it."""
        return replace(self, scale=self.scale.to(dtype)) if self.grid.scaling.stored is None else self

    def sha256(self) -> str:
        """A digest of codes, scales and zero points: two packed weights are bit-identical exactly if it is equal."""
        digest = hashlib.sha256(f"{self.grid.name} {self.group_size} {self.shape}".encode())
        for tensor in (self.words, self.scale, self.zero, self.group_index, self.shared):
            if tensor is not None:
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _lowest(grid: Grid) -> int:
    """The smallest stored code: integers are signed, table indexes and bit patterns are not."""
    return grid.lowest if isinstance(grid, IntGrid) else 0
