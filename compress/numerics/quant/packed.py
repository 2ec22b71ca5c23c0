"""Packed codes: `Codes` with the codes as a dense bit stream, the form that layers hold and layouts store.

Of a pruned weight, the kept codes alone may be packed, with where they stand.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from compress.numerics.quant.bits import pack, packed_width, unpack
from compress.numerics.quant.codes import Codes, GroupSize, groups_in, spread, store
from compress.numerics.quant.grids import Grid, IntGrid
from compress.numerics.sparse.positions import PART, Kept, Sparsity


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """A quantized weight of `shape` (out, in) with its codes packed along the input axis.

    words: [out, ceil(in * bits / 32)] int32 (codes counted from 0 up). scale: [out, groups], as it is stored:
    floats, or uint8 where the grid says so. zero: like scale, int8 or (float_zeros) in floats, or None. group_index:
    [in] int32 or None.
    shared: [n] float32 or None, what the stored scales have in common. kept: where the codes stand if only those of
    kept weights are in words, which are then [out, words] for N:M (all rows are alike) and [words], one stream of all
    rows, for a bitmask; the other weights are zero.
    """

    words: Int[Tensor, "out words"]
    scale: Shaped[Tensor, "out groups"]
    zero: Shaped[Tensor, "out groups"] | None
    grid: Grid
    group_size: GroupSize
    shape: tuple[int, int]
    group_index: Int[Tensor, " in"] | None = None
    shared: Float[Tensor, " n"] | None = None
    kept: Kept | None = None

    @classmethod
    def of(cls, codes: Codes) -> PackedCodes:
        """Pack; exact in both directions."""
        grid = codes.grid
        words = pack(codes.codes.to(torch.int16) - _lowest(grid), grid.bits)
        zero = codes.zero if codes.zero is None or codes.float_zeros else codes.zero.to(torch.int8)
        scale = grid.scaling.encode(codes.scale, codes.shared)
        return cls(words, scale, zero, grid, codes.group_size, codes.shape, codes.group_index, codes.shared)

    @classmethod
    def empty(
        cls, grid: Grid, group_size: GroupSize, shape: tuple[int, int], symmetric: bool, indexed: bool,
        storage: torch.dtype, sparsity: Sparsity | None = None, float_zeros: bool = False,
    ) -> PackedCodes:  # fmt: skip
        """Tensors of the right shapes and dtypes without values, for counting bytes."""
        meta = torch.device("meta")
        rows, width = shape
        *lines, count = shape if sparsity is None else sparsity.values(shape)
        scales = 1 if group_size == "tensor" else rows, groups_in(width, group_size)
        shared = grid.scaling.shared_count(math.prod(scales))
        return cls(
            torch.empty(*lines, packed_width(count, grid.bits), dtype=torch.int32, device=meta),
            torch.empty(scales, dtype=grid.scaling.stored or storage, device=meta),
            None if symmetric else torch.empty(scales, dtype=storage if float_zeros else torch.int8, device=meta),
            grid, group_size, shape,
            torch.empty(width, dtype=torch.int32, device=meta) if indexed else None,
            torch.empty(shared, dtype=torch.float32, device=meta) if shared else None,
            None if sparsity is None else Kept.empty(sparsity, shape),
        )  # fmt: skip

    def only(self, kept: Kept) -> PackedCodes:
        """The same weight by the codes of its kept weights alone; the others, which must be zero, are left out."""
        assert self.kept is None
        codes = kept.gather(unpack(self.words, self.grid.bits, self.shape[1]))
        steps = [pack(part, self.grid.bits) for part in codes.split(PART, dim=-1)]
        return replace(self, words=torch.cat(steps, dim=-1), kept=kept)

    def stored_codes(self, rows: slice, where: slice) -> Int[Tensor, "*codes"]:
        """Unsigned codes of some rows as they are stored: [rows, in], or those of the kept weights `where`, [kept]."""
        if self.kept is None or self.words.ndim == 2:
            count = self.shape[1] if self.kept is None else self.kept.sparsity.values(self.shape)[1]
            found = unpack(self.words[rows], self.grid.bits, count)
            return found if self.kept is None else found.flatten()
        first = where.start // 32 * 32  # 32 codes fill whole words
        words = self.words[first // 32 * self.grid.bits : packed_width(where.stop, self.grid.bits)]
        return unpack(words, self.grid.bits, where.stop - first)[where.start - first :]

    def codes(self) -> Codes:
        """Unpack; where a weight is not kept, the code of zero."""
        scale = self.scales()
        zero = None if self.zero is None else self.zero.to(scale.dtype)
        if self.kept is None:
            codes = self._signed(unpack(self.words, self.grid.bits, self.shape[1]))
        else:
            codes = self._zeros(scale, zero)
            for rows, mask, where in self.kept.parts():
                codes[rows].masked_scatter_(mask, self._signed(self.stored_codes(rows, where)))
        return Codes(codes, scale, zero, self.grid, self.group_size, self.group_index, self.shared, self.float_zeros)

    def _signed(self, unsigned: Int[Tensor, "*codes"]) -> Int[Tensor, "*codes"]:
        return store(unsigned.to(torch.int16) + _lowest(self.grid), self.grid)

    def _zeros(self, scale: Tensor, zero: Tensor | None) -> Int[Tensor, "out in"]:
        """The codes of zero."""
        width = self.shape[1]
        steps = spread(scale.masked_fill(scale == 0, 1), width, self.group_size, self.group_index)
        shifts = None if zero is None else spread(zero, width, self.group_size, self.group_index)
        zeros = torch.zeros(self.shape, dtype=scale.dtype, device=scale.device)
        return store(self.grid.encode(zeros, steps, shifts), self.grid)

    def scales(self) -> Float[Tensor, "out groups"]:
        """The scales as numbers."""
        return self.grid.scaling.decode(self.scale, self.shared)

    @property
    def float_zeros(self) -> bool:
        """Whether there are zero points that need not be whole numbers."""
        return self.zero is not None and self.zero.is_floating_point()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scales as numbers."""
        return self.scale.dtype if self.grid.scaling.stored is None else torch.float32

    def in_storage(self, dtype: torch.dtype) -> PackedCodes:
        """The same with scales and zero points that are floats in `dtype`; exact where they were fitted for it."""
        if self.grid.scaling.stored is not None:
            return self
        zero = self.zero.to(dtype) if self.zero is not None and self.float_zeros else self.zero
        return replace(self, scale=self.scale.to(dtype), zero=zero)

    def sha256(self) -> str:
        """A digest of codes, scales and zero points: two packed weights are bit-identical exactly if it is equal."""
        sparsity, positions = ("", None) if self.kept is None else (f" {self.kept.sparsity.text}", self.kept.words)
        digest = hashlib.sha256(f"{self.grid.name} {self.group_size} {self.shape}{sparsity}".encode())
        for tensor in (self.words, self.scale, self.zero, self.group_index, self.shared, positions):
            if tensor is not None:
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _lowest(grid: Grid) -> int:
    """The smallest stored code: integers are signed, table indexes and bit patterns are not."""
    return grid.lowest if isinstance(grid, IntGrid) else 0
