"""A low-rank product of two matrices, W = B A.

b_<name>   B [out, rank], a part such as floats (`parts.dense`) or codes (`parts.codes`)
a_<name>   A [rank, in], such a part, too
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Self

from compress.layers.base import COMPONENTS, PartScheme, TensorSpec, WeightPart, read_scheme, stored_name
from compress.numerics.quant.grids import Grid

A, B = "a", "b"


@dataclass(frozen=True)
class LowRankScheme(PartScheme):
    """A product of two matrices.

    Attributes:
        rank: inner dimension of the product.
        a: scheme of A [rank, in].
        b: scheme of B [out, rank].
    """

    kind: ClassVar[str] = "low_rank"
    readers: ClassVar[Mapping[str, Any]] = {"a": read_scheme, "b": read_scheme}

    rank: int
    a: PartScheme
    b: PartScheme

    @property
    def grids(self) -> tuple[Grid, ...]:
        return (*self.a.grids, *self.b.grids)

    @property
    def text(self) -> str:
        return f"rank {self.rank} in {self.a.text.partition(',')[0]}"

    def refuses(self, shape: tuple[int, int]) -> str | None:
        if self.rank >= min(shape):
            return f"rank {self.rank} is not below its {shape[0]} outputs and {shape[1]} inputs; use a smaller rank"
        return self.a.refuses((self.rank, shape[1])) or self.b.refuses((shape[0], self.rank))

    def tensors(self, shape: tuple[int, int], lattice: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        rows, width = shape
        pairs = ((A, self.a, (self.rank, width)), (B, self.b, (rows, self.rank)))
        return {stored_name(key, n): spec for key, factor, size in pairs for n, spec in factor.tensors(size).items()}


class LowRankPart(WeightPart[LowRankScheme]):
    """The product B A.

    Attributes:
        a: part [rank, in].
        b: part [out, rank].
    """

    kind: ClassVar[str] = "low_rank"

    def __init__(self, scheme: LowRankScheme, shape: tuple[int, int], a: WeightPart, b: WeightPart) -> None:
        super().__init__(scheme, shape, {})
        self.a, self.b = a, b

    @classmethod
    def of(cls, a: WeightPart, b: WeightPart) -> Self:
        """Multiply two parts."""
        return cls(LowRankScheme(a.shape[0], a.scheme, b.scheme), (b.shape[0], a.shape[1]), a, b)

    @classmethod
    def read(cls, scheme: LowRankScheme, shape: tuple[int, int], tensors: Mapping[str, Tensor], prefix: str) -> Self:
        sizes = {A: (scheme.rank, shape[1]), B: (shape[0], scheme.rank)}
        factors = {A: scheme.a, B: scheme.b}
        parts = {
            key: COMPONENTS[factors[key].kind].read(factors[key], sizes[key], tensors, stored_name(prefix, key))
            for key in factors
        }
        return cls(scheme, shape, parts[A], parts[B])  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        pairs = ((A, self.a), (B, self.b))
        return {stored_name(key, name): tensor for key, part in pairs for name, tensor in part.tensors().items()}

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype

    def validate(self, prefix: str) -> None:
        self.a.validate(stored_name(prefix, A))
        self.b.validate(stored_name(prefix, B))

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        return self.b.dense(dtype) @ self.a.dense(dtype)

    def product(self, x: Float[Tensor, "*batch in"], bias: Tensor | None = None) -> Float[Tensor, "*batch out"]:
        return self.b.product(self.a.product(x), bias)

    def in_storage(self, dtype: torch.dtype) -> LowRankPart:
        return LowRankPart(self.scheme, self.shape, self.a.in_storage(dtype), self.b.in_storage(dtype))

    def round_to(self, dtype: torch.dtype) -> None:
        self.a.round_to(dtype)
        self.b.round_to(dtype)
