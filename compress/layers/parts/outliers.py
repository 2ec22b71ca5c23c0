"""A few weights as floats, all others zero: whole columns, or single positions in compressed sparse rows (CSR).

columns   int32 [n]        by column: indices of the columns, ascending; by position: the column of every value
rows      int32 [O + 1]    by position: index of the first value of each row, and the number of values
values    float [O, n]     by column; by position [n], row by row with ascending columns
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from typing_extensions import Self

from compress.layers.base import PartScheme, TensorSpec, WeightPart, stored_name
from compress.layers.fields import read_dtype
from compress.numerics.dtypes import DTYPES


@dataclass(frozen=True)
class OutliersScheme(PartScheme):
    """Outlier columns, or single outlier weights.

    Attributes:
        count: number of columns or weights.
        by: 'column' for columns, 'position' for single weights.
        dtype: dtype of the values by name; None for the storage dtype of the run.
    """

    kind: ClassVar[str] = "outliers"
    readers: ClassVar[Mapping[str, Any]] = {"dtype": read_dtype}

    count: int
    by: Literal["column", "position"] = "column"
    dtype: str | None = None

    @property
    def text(self) -> str:
        return f"{self.count} outlier {'columns' if self.by == 'column' else 'weights'}"

    def refuses(self, shape: tuple[int, int]) -> str | None:
        total = shape[1] if self.by == "column" else shape[0] * shape[1]
        if not 0 < self.count < total:
            return f"{self.text} of {total} cannot be kept; change the budget, or leave the layer out (ignore)"
        return None

    def tensors(self, shape: tuple[int, int], lattice: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        dtype = None if self.dtype is None else DTYPES[self.dtype]
        columns = TensorSpec((self.count,), torch.int32)
        if self.by == "column":
            return {"columns": columns, "values": TensorSpec((shape[0], self.count), dtype)}
        rows = TensorSpec((shape[0] + 1,), torch.int32)
        return {"columns": columns, "rows": rows, "values": TensorSpec((self.count,), dtype)}


class OutliersPart(WeightPart[OutliersScheme]):
    """A few weights as floats; all others are zero.

    Attributes:
        columns: indices of the columns; by position, the column of every value.
        rows: by position, the index of the first value of each row; None by column.
        values: the weights.
    """

    kind: ClassVar[str] = "outliers"
    names: ClassVar[Mapping[str, str]] = {"columns": "columns", "rows": "rows", "values": "values"}

    columns: Int[Tensor, " n"]
    rows: Int[Tensor, " rows"] | None
    values: Tensor

    @classmethod
    def of_columns(
        cls, columns: Int[Tensor, " n"], values: Float[Tensor, "out n"], width: int, dtype: str | None = None
    ) -> Self:
        """Store whole columns.

        Args:
            columns: indices of the columns, ascending.
            values: their weights.
            width: number of columns of the layer.
            dtype: dtype to which the values are cast, by name; None for no cast.
        """
        scheme = OutliersScheme(len(columns), "column", dtype)
        tensors = {"columns": columns.to(torch.int32), "values": values if dtype is None else values.to(DTYPES[dtype])}
        return cls(scheme, (values.shape[0], width), tensors)

    @classmethod
    def of_positions(
        cls, weight: Float[Tensor, "out in"], outlier_mask: Bool[Tensor, "out in"], dtype: str | None = None
    ) -> Self:
        """Store the weights at which `outlier_mask` is True."""
        counts = outlier_mask.sum(1)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
        values = weight[outlier_mask]
        tensors = {
            "columns": outlier_mask.nonzero()[:, 1].to(torch.int32),
            "rows": starts,
            "values": values if dtype is None else values.to(DTYPES[dtype]),
        }
        return cls(OutliersScheme(len(values), "position", dtype), (weight.shape[0], weight.shape[1]), tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        weight = torch.zeros(self.shape, dtype=dtype, device=self.values.device)
        if self.rows is None:
            weight[:, self.columns.long()] = self.values.to(dtype)
            return weight
        counts = self.rows.long().diff()
        row = torch.arange(self.shape[0], device=counts.device).repeat_interleave(counts)
        weight[row, self.columns.long()] = self.values.to(dtype)
        return weight

    def product(self, x: Float[Tensor, "*batch in"], bias: Tensor | None = None) -> Float[Tensor, "*batch out"]:
        if self.rows is not None:
            return super().product(x, bias)
        return nn.functional.linear(x.index_select(-1, self.columns), self.values.to(x.dtype), bias)

    def in_storage(self, dtype: torch.dtype) -> OutliersPart:
        if self.scheme.dtype is not None:
            return self
        tensors = {"columns": self.columns, "rows": self.rows, "values": self.values.to(dtype)}
        return OutliersPart(self.scheme, self.shape, tensors)

    def validate(self, prefix: str) -> None:
        super().validate(prefix)
        name, (height, width) = stored_name(prefix, "columns"), self.shape
        if int(self.columns.min()) < 0 or int(self.columns.max()) >= width:
            raise ValueError(f"{name} holds a column outside of the {width} columns of the layer")
        rises = self.columns.long().diff() > 0
        if self.rows is not None:
            self._validate_rows(prefix, height)
            row_ends = self.rows[1:-1].long()
            rises[row_ends[(row_ends > 0) & (row_ends < len(self.columns))] - 1] = True  # a new row begins
        if not bool(rises.all()):
            raise ValueError(f"{name} is not ascending")

    def _validate_rows(self, prefix: str, height: int) -> None:
        assert self.rows is not None
        rows = self.rows.long()  # differences of int32 can wrap
        if int(rows[0]) != 0 or int(rows[-1]) != len(self.columns) or bool((rows.diff() < 0).any()):
            raise ValueError(
                f"{stored_name(prefix, 'rows')} does not rise from 0 to {len(self.columns)} over {height} rows"
            )
