"""Dense weights: a float for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import Self

from compress.numerics.sparse.positions import Kept, Value
from compress.weights.base import PartScheme, TensorSpec, WeightPart


@dataclass(frozen=True)
class DenseScheme(PartScheme):
    """A matrix of floats in the storage dtype."""

    kind: ClassVar[str] = "dense"

    def tensors(self, shape: tuple[int, int], lattice: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        return {"": TensorSpec(lattice or shape)}

    def value(self, storage: torch.dtype) -> Value:
        return storage


class DensePart(WeightPart):
    """A matrix of floats, or the kept ones of a matrix."""

    kind: ClassVar[str] = "dense"
    names: ClassVar[Mapping[str, str]] = {"weight": ""}

    weight: Tensor

    @classmethod
    def of(cls, weight: Float[Tensor, "out in"]) -> Self:
        """Hold a weight; it is shared, not copied."""
        return cls(DenseScheme(), (weight.shape[0], weight.shape[1]), {"weight": weight})

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        return self.weight.to(dtype)

    def product(self, x: Float[Tensor, "*batch in"], bias: Tensor | None = None) -> Float[Tensor, "*batch out"]:
        return torch.nn.functional.linear(x, self.weight, bias)

    def round_to(self, dtype: torch.dtype) -> None:
        if torch.finfo(dtype).bits < torch.finfo(self.weight.dtype).bits:
            self.weight.data = self.weight.data.to(dtype).to(self.weight.dtype)

    def in_storage(self, dtype: torch.dtype) -> DensePart:
        return DensePart(self.scheme, self.shape, {"weight": self.weight.to(dtype)})

    def gathered(self, kept: Kept) -> WeightPart:
        return DensePart(self.scheme, self.shape, {"weight": kept.gather(self.weight)})

    def kept_rows(
        self, rows: slice, mask: Bool[Tensor, "rows in"], where: slice, dtype: torch.dtype
    ) -> Float[Tensor, "rows in"]:
        found = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return found.masked_scatter_(mask, self.weight.flatten()[where].to(dtype))
