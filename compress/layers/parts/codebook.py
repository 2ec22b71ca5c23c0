"""Weights in codebooks: each run of weights of a row is a sum of codebook entries.

codes   int32 [out, words]                   the indices of each row, bit-packed: by run, then by codebook
books   float [tables, count, 2^bits, length]   one table of codebooks for all rows, or one per row
scale   float [out]                          a factor per row, only if `scaled`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Self

from compress.layers.base import PartScheme, TensorSpec, WeightPart
from compress.numerics.quant.bits import pack, packed_width, unpack

WIDEST = 8  # bits of an index


@dataclass(frozen=True)
class CodebookScheme(PartScheme):
    """Codebook indices of `bits` bits.

    Attributes:
        bits: bits of an index.
        length: weights of a run.
        count: codebooks whose entries are summed.
        per: 'tensor' for one table of codebooks, 'channel' for a table per row.
        scaled: whether every row has a scale.
    """

    kind: ClassVar[str] = "codebook"

    bits: int
    length: int = 1
    count: int = 1
    per: Literal["tensor", "channel"] = "channel"
    scaled: bool = False

    @property
    def quantized(self) -> bool:
        return True

    @property
    def text(self) -> str:
        books = f"{self.count} codebooks" if self.count > 1 else "codebook"
        runs = f" of {self.length} weights" if self.length > 1 else ""
        return f"{books}{runs}, {self.bits} bits, per {self.per}"

    @property
    def free_scales(self) -> bool:
        return self.count == 1  # a factor of an entry is a factor of its weights

    def check(self) -> None:
        super().check()
        if self.bits > WIDEST:
            raise ValueError(f"bits of {self.kind} is {self.bits}, but it must be at most {WIDEST}")

    def refuses(self, shape: tuple[int, int]) -> str | None:
        rows, width = shape
        if width % self.length:
            return f"runs of {self.length} weights do not divide its {width} inputs; leave the layer out (ignore)"
        entries, runs = 2**self.bits, width // self.length * (rows if self.per == "tensor" else 1)
        if entries > runs:
            unit = "weights" if self.length == 1 else f"runs of {self.length} weights"
            return f"a codebook of {entries} entries is larger than its {runs} {unit}; use fewer bits, or ignore it"
        return None

    def tensors(self, shape: tuple[int, int], lattice: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        rows, width = shape
        words = packed_width(width // self.length * self.count, self.bits)
        tables = rows if self.per == "channel" else 1
        specs = {
            "codes": TensorSpec((rows, words), torch.int32),
            "books": TensorSpec((tables, self.count, 2**self.bits, self.length)),
        }
        return specs | ({"scale": TensorSpec((rows,))} if self.scaled else {})


class CodebookPart(WeightPart[CodebookScheme]):
    """Indices into codebooks."""

    kind: ClassVar[str] = "codebook"
    names: ClassVar[Mapping[str, str]] = {"words": "codes", "books": "books", "scale": "scale"}

    words: Int[Tensor, "out words"]
    books: Float[Tensor, "tables count entries length"]
    scale: Float[Tensor, " out"] | None

    @classmethod
    def of(
        cls,
        indices: Int[Tensor, "out runs count"],
        books: Float[Tensor, "tables count entries length"],
        scale: Float[Tensor, " out"] | None = None,
    ) -> Self:
        """Pack indices.

        Args:
            indices: index of each run in each codebook.
            books: codebooks; one table is for all rows.
            scale: factor of each row, or None.
        """
        tables, count, entries, length = books.shape
        rows, runs, _ = indices.shape
        per = "channel" if tables == rows and rows > 1 else "tensor"
        scheme = CodebookScheme(entries.bit_length() - 1, length, count, per, scale is not None)
        tensors = {"words": pack(indices.reshape(rows, runs * count), scheme.bits), "books": books, "scale": scale}
        return cls(scheme, (rows, runs * length), tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.books.dtype

    @property
    def indices(self) -> Int[Tensor, "out runs count"]:
        """The unpacked indices."""
        return self._indices(self.words)

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        return self._dequantized_rows(self.words, slice(None), dtype)

    def rows_at(self, ids: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "n in"]:
        return self._dequantized_rows(self.words[ids], ids, dtype)

    def _dequantized_rows(self, words: Tensor, rows: Any, dtype: torch.dtype) -> Float[Tensor, "rows in"]:
        """Dequantize some rows.

        Args:
            words: packed indices of these rows.
            rows: index of these rows.
            dtype: dtype of the result.
        """
        weight_rows = self._entries(words, rows, self.books.to(dtype))
        return weight_rows if self.scale is None else weight_rows * self.scale[rows].to(dtype)[:, None]

    def _entries(self, words: Tensor, rows: Any, books: Tensor) -> Float[Tensor, "rows in"]:
        """Sum the entries of some rows in the given codebooks."""
        indices = self._indices(words).long()
        if self.scheme.per == "channel":
            flat = books[rows].transpose(1, 2).flatten(2)  # [rows, entries, count * length]
            entries = sum(
                flat[:, :, at : at + self.scheme.length].gather(
                    1, indices[:, :, book, None].expand(-1, -1, self.scheme.length)
                )
                for book, at in enumerate(range(0, flat.shape[2], self.scheme.length))
            )
        else:
            entries = sum(books[0, book][indices[:, :, book]] for book in range(self.scheme.count))
        assert isinstance(entries, Tensor)
        return entries.flatten(1)

    def _indices(self, words: Tensor) -> Int[Tensor, "rows runs count"]:
        runs = self.shape[1] // self.scheme.length
        return unpack(words, self.scheme.bits, runs * self.scheme.count).reshape(-1, runs, self.scheme.count)

    def in_storage(self, dtype: torch.dtype) -> CodebookPart:
        scale = None if self.scale is None else self.scale.to(dtype)
        return CodebookPart(
            self.scheme, self.shape, {"words": self.words, "books": self.books.to(dtype), "scale": scale}
        )

    # Training: the entries of a single codebook are trained like scales, by a factor per entry

    @property
    def free_scale(self) -> Float[Tensor, "tables 1 entries length"] | None:
        return self.books if self.scheme.free_scales else None

    def with_scale(self, scale: Float[Tensor, "tables 1 entries length"]) -> CodebookPart:
        return CodebookPart(self.scheme, self.shape, {"words": self.words, "books": scale, "scale": self.scale})

    def spread(self, per_group: Float[Tensor, "tables 1 entries length"]) -> Float[Tensor, "out in"]:
        return self._entries(self.words, slice(None), per_group)

    def sum_groups(self, values: Float[Tensor, "out in"]) -> Float[Tensor, "tables 1 entries length"]:
        tables, _, entries, length = self.books.shape
        codes = self.indices[:, :, 0].long()
        if tables > 1:
            codes = codes + entries * torch.arange(tables, device=codes.device)[:, None]
        sums = values.new_zeros(tables * entries, length)
        return sums.index_add_(0, codes.flatten(), values.reshape(-1, length)).view(tables, 1, entries, length)
