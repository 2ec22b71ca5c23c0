"""Dense weights: one float per weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear
from typing_extensions import Self

from compress.layers.base import PartScheme, TensorSpec, WeightPart
from compress.layers.fields import read_dtype
from compress.numerics.dtypes import DTYPES, in_slices, rounded
from compress.numerics.sparse.positions import PackedMask, Value


@dataclass(frozen=True)
class DenseScheme(PartScheme):
    """A matrix of floats. dtype: its stored dtype by name ('float16'); None: the storage dtype of the run."""

    kind: ClassVar[str] = "dense"
    readers: ClassVar[Mapping[str, Any]] = {"dtype": read_dtype}

    dtype: str | None = None

    @property
    def text(self) -> str:
        return self.dtype or self.kind

    def tensors(self, shape: tuple[int, int], lattice: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        return {"": TensorSpec(lattice or shape, None if self.dtype is None else DTYPES[self.dtype])}

    def value(self, storage: torch.dtype) -> Value:
        return storage if self.dtype is None else DTYPES[self.dtype]


class DensePart(WeightPart):
    """A matrix of floats, or the kept weights of one."""

    kind: ClassVar[str] = "dense"
    scheme: DenseScheme
    names: ClassVar[Mapping[str, str]] = {"weight": ""}

    weight: Tensor

    @classmethod
    def of(cls, weight: Float[Tensor, "out in"], dtype: str | None = None) -> Self:
        """Hold a weight, cast to `dtype`. Without a dtype the tensor is shared, not copied."""
        held = weight if dtype is None else weight.to(DTYPES[dtype])
        return cls(DenseScheme(dtype), (weight.shape[0], weight.shape[1]), {"weight": held})

    @property
    def casts(self) -> bool:
        return self.scheme.dtype is None

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        return self.weight.to(dtype)

    def rows_at(self, ids: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "n in"]:
        return self.weight[ids].to(dtype)

    def product(self, x: Float[Tensor, "*batch in"], bias: Tensor | None = None) -> Float[Tensor, "*batch out"]:
        parts = in_slices(self.weight)
        if self.weight.dtype == x.dtype or len(parts) == 1:
            return linear(x, self.weight.to(x.dtype), bias)
        # Some rows are cast at a time: a copy of a whole head would be the largest tensor of a run. Outputs that stay
        # between the casts would keep the allocator from using their memory again.
        found, start = x.new_empty(*x.shape[:-1], len(self.weight)), 0
        for part in parts:
            rows = slice(start, start + len(part))
            found[..., rows] = linear(x, part.to(x.dtype), None if bias is None else bias[rows])
            start = rows.stop
        return found

    def round_to(self, dtype: torch.dtype) -> None:
        self.weight.data = rounded(self.weight.data, dtype)

    def in_storage(self, dtype: torch.dtype) -> DensePart:
        if self.scheme.dtype is not None:
            return self
        return DensePart(self.scheme, self.shape, {"weight": self.weight.to(dtype)})

    def gathered(self, kept: PackedMask) -> WeightPart:
        return DensePart(self.scheme, self.shape, {"weight": kept.gather(self.weight)})

    def kept_rows(
        self, rows: slice, mask: Bool[Tensor, "rows in"], where: slice, dtype: torch.dtype
    ) -> Float[Tensor, "rows in"]:
        found = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return found.masked_scatter_(mask, self.weight.flatten()[where].to(dtype))
