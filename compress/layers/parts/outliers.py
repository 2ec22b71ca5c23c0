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
    """`count` columns, or `count` single weights. dtype: of the values, by name; None: the storage dtype."""

    kind: ClassVar[str] = "outliers"
    readers: ClassVar[Mapping[str, Any]] = {"dtype": read_dtype}

    count: int
    by: Literal["column", "position"] = "column"
    dtype: str | None = None

    @property
    def text(self) -> str:
        return f"{self.count} outlier {'columns' if self.by == 'column' else 'weights'}"

    def refuses(self, shape: tuple[int, int]) -> str | None:
        most = shape[1] if self.by == "column" else shape[0] * shape[1]
        if not 0 < self.count < most:
            return f"{self.text} of {most} cannot be kept; change the budget, or leave the layer out (ignore)"
        return None

    def tensors(self, shape: tuple[int, int], lattice: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        own = None if self.dtype is None else DTYPES[self.dtype]
        columns = TensorSpec((self.count,), torch.int32)
        if self.by == "column":
            return {"columns": columns, "values": TensorSpec((shape[0], self.count), own)}
        rows = TensorSpec((shape[0] + 1,), torch.int32)
        return {"columns": columns, "rows": rows, "values": TensorSpec((self.count,), own)}


class OutliersPart(WeightPart):
    """A few weights as floats."""

    kind: ClassVar[str] = "outliers"
    names: ClassVar[Mapping[str, str]] = {"columns": "columns", "rows": "rows", "values": "values"}

    scheme: OutliersScheme
    columns: Int[Tensor, " n"]
    rows: Int[Tensor, " rows"] | None
    values: Tensor

    @classmethod
    def of_columns(
        cls, columns: Int[Tensor, " n"], values: Float[Tensor, "out n"], width: int, dtype: str | None = None
    ) -> Self:
        """Hold whole columns. columns: ascending. width: number of columns of the layer."""
        scheme = OutliersScheme(len(columns), "column", dtype)
        held = {"columns": columns.to(torch.int32), "values": values if dtype is None else values.to(DTYPES[dtype])}
        return cls(scheme, (values.shape[0], width), held)

    @classmethod
    def of_positions(
        cls, weight: Float[Tensor, "out in"], chosen: Bool[Tensor, "out in"], dtype: str | None = None
    ) -> Self:
        """Hold the weights at which `chosen` is True."""
        counts = chosen.sum(1)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
        values = weight[chosen]
        held = {
            "columns": chosen.nonzero()[:, 1].to(torch.int32),
            "rows": starts,
            "values": values if dtype is None else values.to(DTYPES[dtype]),
        }
        return cls(OutliersScheme(len(values), "position", dtype), (weight.shape[0], weight.shape[1]), held)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        found = torch.zeros(self.shape, dtype=dtype, device=self.values.device)
        if self.rows is None:
            found[:, self.columns.long()] = self.values.to(dtype)
            return found
        counts = self.rows.long().diff()
        row = torch.arange(self.shape[0], device=counts.device).repeat_interleave(counts)
        found[row, self.columns.long()] = self.values.to(dtype)
        return found

    def product(self, x: Float[Tensor, "*batch in"], bias: Tensor | None = None) -> Float[Tensor, "*batch out"]:
        if self.rows is not None:
            return super().product(x, bias)
        return nn.functional.linear(x.index_select(-1, self.columns), self.values.to(x.dtype), bias)

    def in_storage(self, dtype: torch.dtype) -> OutliersPart:
        if self.scheme.dtype is not None:
            return self
        held = {"columns": self.columns, "rows": self.rows, "values": self.values.to(dtype)}
        return OutliersPart(self.scheme, self.shape, held)

    def validate(self, prefix: str) -> None:
        name, (height, width) = stored_name(prefix, "columns"), self.shape
        if int(self.columns.min()) < 0 or int(self.columns.max()) >= width:
            raise ValueError(f"{name} holds a column outside of the {width} columns of the layer")
        rises = self.columns.diff() > 0
        if self.rows is not None:
            self._validate_rows(prefix, height)
            ends = self.rows[1:-1].long()
            rises[ends[(ends > 0) & (ends < len(self.columns))] - 1] = True  # a new row begins
        if not bool(rises.all()):
            raise ValueError(f"{name} is not ascending")

    def _validate_rows(self, prefix: str, height: int) -> None:
        assert self.rows is not None
        first, last = int(self.rows[0]), int(self.rows[-1])
        if first != 0 or last != len(self.columns) or bool((self.rows.diff() < 0).any()):
            raise ValueError(
                f"{stored_name(prefix, 'rows')} does not rise from 0 to {len(self.columns)} over {height} rows"
            )
