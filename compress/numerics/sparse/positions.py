"""Packed sparse weights: only the remaining weights, with their positions as N:M indexes or a bitmask; lossless.

The mask is stored, not the pattern of zeros: a remaining weight may be zero, and is stored like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from compress.numerics.quant.bits import pack, packed_width, unpack

PART = 1 << 20  # weights per step; limits temporary tensors to about 16 MiB
LARGEST_M = 256  # an index inside a group has at most 8 bits

Value = torch.dtype | int
"""The type of a remaining weight: a float dtype, or the number of bits of a code."""

SparsePolicy = Literal["auto", "always", "off"]
"""When to store packed sparse weights: if that is not larger (auto), for every mask (always), or never (off)."""


@dataclass(frozen=True)
class SparseLayout:
    """Storage of the positions of remaining weights: as N:M indexes, or as a bitmask.

    Attributes:
        kept: number of remaining weights of the matrix.
        n_of_m: (N, M) of the indexes; None: a bitmask.
    """

    kept: int
    n_of_m: tuple[int, int] | None = None

    @classmethod
    def regular(cls, shape: tuple[int, int], n: int, m: int) -> SparseLayout:
        """Create N of every M columns of [out, in]; all columns after the last complete group remain."""
        rows, width = shape
        return cls(rows * (width // m * n + width % m), (n, m))

    @classmethod
    def named(cls, text: str, count: int) -> SparseLayout:
        """Parse `text`."""
        n, _, m = text.partition(":")
        return cls(count, None if text == "bitmask" else (int(n), int(m)))

    @property
    def text(self) -> str:
        """'2:4', or 'bitmask'."""
        return "bitmask" if self.n_of_m is None else "{}:{}".format(*self.n_of_m)

    def words(self, width: int) -> int:
        """Return the number of int32 words per row for the positions."""
        if self.n_of_m is None:
            return packed_width(width, 1)
        n, m = self.n_of_m
        return packed_width(width // m * n, index_bits(m))

    def values(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the remaining weights: [out, weights per row] for N:M, with equally many per row, else
        [weights].
        """
        return (self.kept,) if self.n_of_m is None else (shape[0], self.kept // shape[0])

    def size_bytes(self, shape: tuple[int, int], value: Value) -> int:
        """Return the bytes of positions and remaining weights together."""
        *rows, count = self.values(shape)
        return shape[0] * self.words(shape[1]) * 4 + math.prod(rows) * _line_bytes(count, value)

    def pays(self, shape: tuple[int, int], value: Value) -> bool:
        """Whether the size is not larger than that of the dense matrix."""
        return self.size_bytes(shape, value) <= shape[0] * _line_bytes(shape[1], value)


def index_bits(m: int) -> int:
    """Return the number of bits of an index within a group, ceil(log2 M)."""
    return (m - 1).bit_length()


def _line_bytes(count: int, value: Value) -> int:
    return packed_width(count, value) * 4 if isinstance(value, int) else count * value.itemsize


def choose(
    candidates: Iterable[SparseLayout], shape: tuple[int, int], value: Value, policy: SparsePolicy
) -> SparseLayout | None:
    """Choose the smallest packed sparse storage, the first of equals; None: store the dense matrix.

    Args:
        candidates: storages of the positions.
        shape: (out, in).
        value: type of a weight.
        policy: when to store only the remaining weights.
    """
    smallest = min(candidates, key=lambda sparsity: sparsity.size_bytes(shape, value))
    return smallest if policy == "always" or (policy == "auto" and smallest.pays(shape, value)) else None


def sparsities(mask: Bool[Tensor, "out in"]) -> list[SparseLayout]:
    """Return the candidates for the smallest lossless storage of a mask, N:M first."""
    width, bitmask = mask.shape[1], SparseLayout(int(mask.count_nonzero()))
    counts = mask[0].cumsum(0).tolist()  # N is read from the first group
    ratios = [(counts[m - 1], m) for m in range(2, min(LARGEST_M, width) + 1)]
    candidates = [SparseLayout(bitmask.kept, (n, m)) for n, m in ratios if 0 < n < m]
    not_larger = [sparsity for sparsity in candidates if sparsity.words(width) <= bitmask.words(width)]
    return [*(sparsity for sparsity in not_larger if sparsity.n_of_m and is_regular(mask, *sparsity.n_of_m)), bitmask]


def is_regular(mask: Bool[Tensor, "out in"], n: int, m: int) -> bool:
    """Whether a mask has exactly N of every M columns, and all columns after the last complete group."""
    full_width = mask.shape[1] // m * m
    return full_width > 0 and all(
        bool((_counts(part[:, :full_width].unflatten(1, (-1, m))) == n).all()) and bool(part[:, full_width:].all())
        for part in mask.split(_rows(mask.shape[1]))
    )


def _counts(mask: Bool[Tensor, "rows groups m"]) -> Int[Tensor, "rows groups"]:
    """Count the remaining columns of each group; a sum over a dimension as short as this takes many times as long."""
    counts = torch.zeros(mask.shape[:2], dtype=torch.int16, device=mask.device)
    for column in mask.unbind(2):
        counts += column
    return counts


def _rows(width: int) -> int:
    return max(1, PART // width)


@dataclass(frozen=True, eq=False)
class PackedMask:
    """The packed positions of the remaining weights of a matrix.

    Attributes:
        words: int32 bit streams as in `numerics.quant.bits`. A bitmask has one bit per column (1: the weight remains).
            N:M has, for every remaining weight of every complete group of M columns, its column in the group in
            ceil(log2 M) bits, ascending.
        sparsity: storage of the positions.
        shape: (out, in).
    """

    words: Int[Tensor, "out words"]
    sparsity: SparseLayout
    shape: tuple[int, int]

    @classmethod
    def of(cls, mask: Bool[Tensor, "out in"], n_of_m: tuple[int, int] | None = None) -> PackedMask:
        """Pack a mask without loss; N:M only if `is_regular`."""
        shape = mask.shape[0], mask.shape[1]
        sparsity = SparseLayout(int(mask.count_nonzero()), n_of_m)
        if n_of_m is None:
            parts = [pack(part, 1) for part in mask.split(_rows(shape[1]))]
        else:
            assert is_regular(mask, *n_of_m)
            parts = [_indexes(part, *n_of_m) for part in mask.split(_rows(shape[1]))]
        return cls(torch.cat(parts), sparsity, shape)

    @classmethod
    def empty(cls, sparsity: SparseLayout, shape: tuple[int, int]) -> PackedMask:
        """Create positions on the meta device, to count bytes."""
        words = torch.empty(shape[0], sparsity.words(shape[1]), dtype=torch.int32, device="meta")
        return cls(words, sparsity, shape)

    def mask(self, rows: slice = slice(None)) -> Bool[Tensor, "rows in"]:
        """Return the mask of a slice of rows, True for remaining weights."""
        if self.sparsity.n_of_m is None:
            return unpack(self.words[rows], 1, self.shape[1]).bool()
        mask = torch.zeros(len(self.words[rows]), self.shape[1], dtype=torch.bool, device=self.words.device)
        columns, groups, tail = self.groups(rows, mask)
        groups.scatter_(2, columns, True)
        tail.fill_(True)
        return mask

    def groups(self, rows: slice, matrix: Shaped[Tensor, "rows in"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the columns of an N:M mask in some rows, and views of these rows of a matrix.

        Args:
            rows: range of rows.
            matrix: the rows.

        Returns:
            The remaining columns of each complete group, [rows, groups, N]; the groups of the matrix,
            [rows, groups, M]; its columns after the last one, which all remain.
        """
        assert self.sparsity.n_of_m is not None
        n, m = self.sparsity.n_of_m
        count = self.shape[1] // m
        columns = unpack(self.words[rows], index_bits(m), count * n).unflatten(1, (count, n)).long()
        return columns, matrix[:, : count * m].unflatten(1, (count, m)), matrix[:, count * m :]

    def parts(self) -> Iterator[KeptRows]:
        """Yield all rows, some at a time."""
        start, step = 0, _rows(self.shape[1])
        for top in range(0, self.shape[0], step):
            part = KeptRows(self, slice(top, min(top + step, self.shape[0])), start)
            yield part
            start = part.values.stop

    def gather(self, matrix: Shaped[Tensor, "out in"]) -> Shaped[Tensor, "*values"]:
        """Return the remaining entries of a matrix, in the shape of `SparseLayout.values`."""
        return torch.cat([part.read(matrix[part.rows]) for part in self.parts()]).reshape(
            self.sparsity.values(self.shape)
        )

    def check(self, name: str) -> None:
        """Check that the words can be the positions of this number of weights.

        Args:
            name: name of the tensor, for errors.

        Raises:
            ValueError: if they cannot.
        """
        count, width = 0, self.shape[1]
        for top in range(0, self.shape[0], _rows(width)):
            words = self.words[top : top + _rows(width)]
            if self.sparsity.n_of_m is None:
                bits = unpack(words, 1, words.shape[1] * 32)
                if bool(bits[:, width:].any()):
                    raise ValueError(f"{name} marks columns after the last of {width}")
                count += int(bits.count_nonzero())
            else:
                _check_indexes(words, *self.sparsity.n_of_m, width, name)
        if self.sparsity.n_of_m is None and count != self.sparsity.kept:
            raise ValueError(f"{name} marks {count} weights as kept, but there are {self.sparsity.kept}")


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Some rows of a packed mask.

    Attributes:
        positions: the mask.
        rows: range of rows.
        start: number of remaining weights in the rows before.
    """

    positions: PackedMask
    rows: slice
    start: int

    @cached_property
    def mask(self) -> Bool[Tensor, "rows in"]:
        """True for remaining weights."""
        return self.positions.mask(self.rows)

    @cached_property
    def values(self) -> slice:
        """The range of the remaining weights among those of all rows, in row-major order."""
        sparsity = self.positions.sparsity
        if sparsity.n_of_m is None:
            count = int(self.mask.count_nonzero())
        else:
            count = (self.rows.stop - self.rows.start) * sparsity.values(self.positions.shape)[1]
        return slice(self.start, self.start + count)

    def read(self, matrix: Shaped[Tensor, "rows in"]) -> Shaped[Tensor, "*values"]:
        """Return the remaining entries of these rows."""
        if self.positions.sparsity.n_of_m is None:
            return matrix[self.mask]
        columns, groups, tail = self.positions.groups(self.rows, matrix)
        return torch.cat([groups.gather(2, columns).flatten(1), tail], dim=1)

    def write(self, values: Shaped[Tensor, " kept"], into: Shaped[Tensor, "rows in"]) -> None:
        """Write the remaining entries, in row-major order, into these rows in place; other entries do not change."""
        if self.positions.sparsity.n_of_m is None:
            into.masked_scatter_(self.mask, values)
            return
        columns, groups, tail = self.positions.groups(self.rows, into)
        of_groups, of_tail = values.view(len(into), -1).tensor_split([columns[0].numel()], dim=1)
        groups.scatter_(2, columns, of_groups.view_as(columns))
        tail.copy_(of_tail)


def _indexes(mask: Bool[Tensor, "rows in"], n: int, m: int) -> Int[Tensor, "rows words"]:
    """Pack the remaining columns of each complete group."""
    groups = mask.shape[1] // m
    columns = mask[:, : groups * m].reshape(-1, m).nonzero()[:, 1]
    return pack(columns.reshape(-1, groups * n), index_bits(m))


def _check_indexes(words: Tensor, n: int, m: int, width: int, name: str) -> None:
    columns = unpack(words, index_bits(m), width // m * n).reshape(-1, n).int()
    if bool((columns >= m).any()) or bool((columns.diff(dim=1) <= 0).any()):
        raise ValueError(f"{name} holds indexes that are not {n} different ones below {m}, ascending")
