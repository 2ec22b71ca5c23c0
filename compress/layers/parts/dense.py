"""Dense weights: one float per weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear
from typing_extensions import Self

from compress.layers.base import PartScheme, TensorSpec, WeightPart
from compress.layers.fields import read_dtype
from compress.numerics.dtypes import DTYPES, in_slices, rounded
from compress.numerics.sparse.positions import KeptRows, PackedMask, Value


@dataclass(frozen=True)
class DenseScheme(PartScheme):
    """A matrix of floats.

    Attributes:
        dtype: stored dtype by name ('float16'); None for the storage dtype of the run.
    """

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


class DensePart(WeightPart[DenseScheme]):
    """A matrix of floats, or the packed sparse weights of one."""

    kind: ClassVar[str] = "dense"
    names: ClassVar[Mapping[str, str]] = {"weight": ""}

    weight: Tensor

    @classmethod
    def of(cls, weight: Float[Tensor, "out in"], dtype: str | None = None) -> Self:
        """Wrap a weight.

        Args:
            weight: the weight; it is shared, not copied, if `dtype` is None.
            dtype: dtype to which the weight is cast, by name.
        """
        stored_weight = weight if dtype is None else weight.to(DTYPES[dtype])
        return cls(DenseScheme(dtype), (weight.shape[0], weight.shape[1]), {"weight": stored_weight})

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
        row_slices = in_slices(self.weight)
        if self.weight.dtype == x.dtype or len(row_slices) == 1:
            return linear(x, self.weight.to(x.dtype), bias)
        # Cast a slice of rows at a time: a copy of a whole LM head would be the largest tensor of a run. A list of the
        # outputs between the casts would fragment the memory of the allocator.
        output, start = x.new_empty(*x.shape[:-1], len(self.weight)), 0
        for row_slice in row_slices:
            rows = slice(start, start + len(row_slice))
            output[..., rows] = linear(x, row_slice.to(x.dtype), None if bias is None else bias[rows])
            start = rows.stop
        return output

    def round_to(self, dtype: torch.dtype) -> None:
        self.weight.data = rounded(self.weight.data, dtype)

    def in_storage(self, dtype: torch.dtype) -> DensePart:
        if self.scheme.dtype is not None:
            return self
        return DensePart(self.scheme, self.shape, {"weight": self.weight.to(dtype)})

    def gathered(self, positions: PackedMask) -> WeightPart:
        return DensePart(self.scheme, self.shape, {"weight": positions.gather(self.weight)})

    def kept_rows(self, part: KeptRows, dtype: torch.dtype) -> Float[Tensor, "rows in"]:
        height = part.rows.stop - part.rows.start
        weight_rows = torch.zeros(height, self.shape[1], dtype=dtype, device=self.weight.device)
        part.write(self.weight.flatten()[part.values].to(dtype), weight_rows)
        return weight_rows
