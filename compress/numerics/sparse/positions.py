"""Pruned weights as their kept values alone, and where these stand: N:M indexes or a bitmask; exact both ways.

A mask is a fact of its own, not the pattern of zeros: a kept weight may be zero, and then it is stored like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from compress.numerics.quant.bits import pack, packed_width, unpack

PART = 1 << 20  # weights that are looked at together; bounds temporaries to some 16 MiB
LARGEST_M = 256  # an index inside a group is a code of at most 8 bits

Value = torch.dtype | int
"""What one kept weight is: a float of a dtype, or a code of so many bits."""

SparsePolicy = Literal["auto", "always", "off"]
"""When kept weights are stored alone: where that is no larger, for every mask, or never."""


@dataclass(frozen=True)
class Sparsity:
    """How the positions of kept weights are stored: as N:M indexes, or as a bitmask (n_of_m: None).

    kept: how many weights of the matrix are kept.
    """

    kept: int
    n_of_m: tuple[int, int] | None = None

    @classmethod
    def regular(cls, shape: tuple[int, int], n: int, m: int) -> Sparsity:
        """N of every M columns of [out, in]; columns after the last whole group are all kept."""
        rows, width = shape
        return cls(rows * (width // m * n + width % m), (n, m))

    @classmethod
    def named(cls, text: str, kept: int) -> Sparsity:
        """The inverse of `text`."""
        n, _, m = text.partition(":")
        return cls(kept, None if text == "bitmask" else (int(n), int(m)))

    @property
    def text(self) -> str:
        """'2:4', or 'bitmask'."""
        return "bitmask" if self.n_of_m is None else "{}:{}".format(*self.n_of_m)

    def words(self, width: int) -> int:
        """int32 words per row that the positions take."""
        if self.n_of_m is None:
            return packed_width(width, 1)
        n, m = self.n_of_m
        return packed_width(width // m * n, index_bits(m))

    def values(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """The shape of the kept weights: [out, kept per row] for N:M, where all rows are alike, otherwise [kept]."""
        return (self.kept,) if self.n_of_m is None else (shape[0], self.kept // shape[0])

    def size_bytes(self, shape: tuple[int, int], value: Value) -> int:
        """Bytes of positions and kept weights together."""
        *rows, count = self.values(shape)
        return shape[0] * self.words(shape[1]) * 4 + math.prod(rows) * _line_bytes(count, value)

    def pays(self, shape: tuple[int, int], value: Value) -> bool:
        """Whether that is no more than the whole matrix takes."""
        return self.size_bytes(shape, value) <= shape[0] * _line_bytes(shape[1], value)


def index_bits(m: int) -> int:
    """ceil(log2 M): the bits of an index inside a group."""
    return (m - 1).bit_length()


def _line_bytes(count: int, value: Value) -> int:
    return packed_width(count, value) * 4 if isinstance(value, int) else count * value.itemsize


def choose(found: Iterable[Sparsity], shape: tuple[int, int], value: Value, policy: SparsePolicy) -> Sparsity | None:
    """How kept weights alone are stored: in the fewest bytes, the first of equals; None where the matrix is stored."""
    best = min(found, key=lambda sparsity: sparsity.size_bytes(shape, value))
    return best if policy == "always" or (policy == "auto" and best.pays(shape, value)) else None


def sparsities(mask: Bool[Tensor, "out in"]) -> list[Sparsity]:
    """All ways to store a mask exactly that may be the smallest, N:M first."""
    width, bitmask = mask.shape[1], Sparsity(int(mask.sum()))
    counts = mask[0].cumsum(0).tolist()  # N shows in the first group
    ratios = [(counts[m - 1], m) for m in range(2, min(LARGEST_M, width) + 1)]
    tried = [Sparsity(bitmask.kept, (n, m)) for n, m in ratios if 0 < n < m]
    fewer = [sparsity for sparsity in tried if sparsity.words(width) <= bitmask.words(width)]
    return [*(sparsity for sparsity in fewer if sparsity.n_of_m and is_regular(mask, *sparsity.n_of_m)), bitmask]


def is_regular(mask: Bool[Tensor, "out in"], n: int, m: int) -> bool:
    """Whether a mask keeps exactly N of every M columns, and all columns after the last whole group."""
    whole = mask.shape[1] // m * m
    return whole > 0 and all(
        bool((part[:, :whole].reshape(-1, m).sum(1) == n).all()) and bool(part[:, whole:].all())
        for part in mask.split(_rows(mask.shape[1]))
    )


def _rows(width: int) -> int:
    return max(1, PART // width)


@dataclass(frozen=True, eq=False)
class Kept:
    """Which weights of a matrix of `shape` (out, in) are kept.

    words: int32 [out, words]; a bitmask has one bit per column (1: kept); N:M has, for every kept weight of every whole
    group of M columns, its column in the group in ceil(log2 M) bits, ascending. Bit streams as in `numerics.bits`.
    """

    words: Int[Tensor, "out words"]
    sparsity: Sparsity
    shape: tuple[int, int]

    @classmethod
    def of(cls, mask: Bool[Tensor, "out in"], n_of_m: tuple[int, int] | None = None) -> Kept:
        """Pack a mask, exactly; N:M only where `is_regular`."""
        shape = mask.shape[0], mask.shape[1]
        sparsity = Sparsity(int(mask.sum()), n_of_m)
        if n_of_m is None:
            parts = [pack(part, 1) for part in mask.split(_rows(shape[1]))]
        else:
            assert is_regular(mask, *n_of_m)
            parts = [_indexes(part, *n_of_m) for part in mask.split(_rows(shape[1]))]
        return cls(torch.cat(parts), sparsity, shape)

    @classmethod
    def empty(cls, sparsity: Sparsity, shape: tuple[int, int]) -> Kept:
        """Positions without values, for counting bytes."""
        words = torch.empty(shape[0], sparsity.words(shape[1]), dtype=torch.int32, device="meta")
        return cls(words, sparsity, shape)

    def mask(self, rows: slice = slice(None)) -> Bool[Tensor, "rows in"]:
        """True where a weight is kept."""
        words, width = self.words[rows], self.shape[1]
        if self.sparsity.n_of_m is None:
            return unpack(words, 1, width).bool()
        n, m = self.sparsity.n_of_m
        groups = width // m
        columns = unpack(words, index_bits(m), groups * n).reshape(-1, groups, n).long()
        found = torch.zeros(words.shape[0], groups, m, dtype=torch.bool, device=words.device)
        tail = torch.ones(words.shape[0], width % m, dtype=torch.bool, device=words.device)
        return torch.cat([found.scatter_(2, columns, True).flatten(1), tail], dim=1)

    def parts(self) -> Iterator[tuple[slice, Bool[Tensor, "rows in"], slice]]:
        """(rows, their mask, where their kept weights stand among all in the order of rows, then columns)."""
        first, step = 0, _rows(self.shape[1])
        for top in range(0, self.shape[0], step):
            rows = slice(top, min(top + step, self.shape[0]))
            mask = self.mask(rows)
            behind = first + int(mask.sum())
            yield rows, mask, slice(first, behind)
            first = behind

    def gather(self, matrix: Shaped[Tensor, "out in"]) -> Shaped[Tensor, "*values"]:
        """The kept entries of a matrix, in the shape of `Sparsity.values`."""
        return torch.cat([matrix[rows][mask] for rows, mask, _ in self.parts()]).reshape(
            self.sparsity.values(self.shape)
        )

    def expand(self, values: Shaped[Tensor, "*values"], into: Shaped[Tensor, "out in"]) -> Shaped[Tensor, "out in"]:
        """The inverse of gather: put kept entries in their places; the others stay as they are."""
        values = values.flatten()
        for rows, mask, where in self.parts():
            into[rows].masked_scatter_(mask, values[where].to(into.dtype))
        return into

    def check(self, name: str) -> None:
        """Raise ValueError when the tensor `name` cannot be the positions of so many weights."""
        count, width = 0, self.shape[1]
        for top in range(0, self.shape[0], _rows(width)):
            words = self.words[top : top + _rows(width)]
            if self.sparsity.n_of_m is None:
                bits = unpack(words, 1, words.shape[1] * 32)
                if bool(bits[:, width:].any()):
                    raise ValueError(f"{name} marks columns after the last of {width}")
                count += int(bits.sum())
            else:
                _check_indexes(words, *self.sparsity.n_of_m, width, name)
        if self.sparsity.n_of_m is None and count != self.sparsity.kept:
            raise ValueError(f"{name} marks {count} weights as kept, but there are {self.sparsity.kept}")


def _indexes(mask: Bool[Tensor, "rows in"], n: int, m: int) -> Int[Tensor, "rows words"]:
    """The columns that are kept in each whole group, packed."""
    groups = mask.shape[1] // m
    columns = mask[:, : groups * m].reshape(-1, m).nonzero()[:, 1]
    return pack(columns.reshape(-1, groups * n), index_bits(m))


def _check_indexes(words: Tensor, n: int, m: int, width: int, name: str) -> None:
    columns = unpack(words, index_bits(m), width // m * n).reshape(-1, n).int()
    if bool((columns >= m).any()) or bool((columns.diff(dim=1) <= 0).any()):
        raise ValueError(f"{name} holds indexes that are not {n} different ones below {m}, ascending")
