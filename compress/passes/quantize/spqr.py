"""SpQR: small groups with scales in 3 bits, and the weights that harm their group most as floats (Dettmers 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from compress.layers.base import WeightPart
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.parts.outliers import OutliersPart, OutliersScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.column_sweep import sweep
from compress.numerics.division import divided
from compress.numerics.dtypes import DTYPES
from compress.numerics.quant.codes import Codes
from compress.numerics.quant.grids import GRIDS, Grid
from compress.numerics.quant.refine import refine_bytes, refined
from compress.numerics.quant.rounding import GridOptions, Rounding, rounding_bytes
from compress.numerics.quant.weighted_search import importance_of
from compress.passes.contract.facts import Effects, Fact
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.families.codebooks import Outliers
from compress.passes.families.compensation import CompensatingPass


class SpQR(CompensatingPass):
    """Quantize in groups of 16 columns, whose scales and minima are integers of 3 bits; a few weights stay floats.

    The scales (and minima) of 16 rows in a group of columns share their range, two float16 numbers each (section 4.1).

    A weight is an outlier if its group loses most without it: the squared error of the group, weighted by 1 / [U_jj]^2,
    less that of the others with their own range (section 4.1, equation 3). The `outliers` with the largest decrease of
    a layer are chosen before the sweep, so that their number is known. The sweep of GPTQ rounds the others, and
    outliers take up errors without any of their own.
    """

    use_for: ClassVar[str] = "3 and 4 bits with little loss in format native: the small groups cost 0.63 bits."
    not_for: ClassVar[str] = "Programs other than compress. Speed: outliers are multiplied one by one."
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.03078"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "masked"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    bits: Literal[2, 3, 4] = Field(default=3, description="bits of a code")
    outliers: float = Field(default=0.002, ge=0, lt=0.5, description="fraction of the weights that stay floats")
    outlier_dtype: Literal["float16", "bfloat16"] = Field(default="float16", description="dtype of outliers")
    order: Literal["natural", "static"] = Field(
        default="static",
        description="order of the columns in the sweep; 'static': columns with large inputs first, groups as they are",
    )
    scale: Literal["absmax", "mse", "importance"] = Field(
        default="importance", description="scale search, as for gptq; 'absmax' covers the range as in the paper"
    )
    refine: int = Field(
        default=1,
        ge=0,
        le=100,
        description="rounds after the sweep in which each code is chosen again; 0: as in the paper",
    )

    @property
    def grid(self) -> Grid:
        """The grid of the codes."""
        return GRIDS[f"uint{self.bits}_tile"]

    @property
    def _kept(self) -> Outliers:
        return Outliers(self.outliers, self.outlier_dtype)

    def effects(self, layer: LayerScheme) -> Effects:
        count = self._kept.count(layer.shape)
        outliers = (OutliersScheme(count, "position", self.outlier_dtype),) if count else ()
        scheme = layer.with_parts(CodesScheme(self.grid, self._size, symmetric=False), *outliers)
        return replace(super().effects(layer), scheme=scheme)

    @property
    def _size(self) -> int:
        """Columns of a group."""
        size = self.grid.group_size
        assert size is not None
        return size

    def memory(self, size: ProblemSize) -> int:
        gain = 8 * 4 * size.shape[0] * size.shape[1]  # groups without a weight, rounded, their errors, and the gains
        return super().memory(size) + max(gain, rounding_bytes(*size.shape), refine_bytes(*size.shape))

    def solve(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> Solution:
        order = None if self.order == "natural" else statistics.diagonal.argsort(descending=True, stable=True)
        factor = statistics.factor_of(layer.name, layer.log, self.regularization, order)
        weight = self.fitted(weight.float(), statistics, order)
        importance = importance_of(factor, order)
        chosen = self._kept.choose(self.gain(weight, importance), None)
        options = GridOptions(self.grid, self._size, False, self.scale, layer.storage)
        options = replace(options, importance=importance) if self.scale == "importance" else options
        rule = _KeepSome(Rounding(weight, options, ~chosen, order), chosen, self.outlier_dtype, order)
        ordered = weight if order is None else weight[:, order]
        solved = sweep(ordered, factor, rule)
        solved = solved if order is None else solved[:, order.argsort()]
        codes = rule.inner.codes
        if not bool(chosen.any()):
            return Solution(self._refined(weight, codes, None, statistics, layer, order))
        apart = OutliersPart.of_positions(solved - codes.dense(), chosen, self.outlier_dtype)
        return Solution(self._refined(weight, codes, apart, statistics, layer, order))

    def _refined(
        self,
        weight: Tensor,
        codes: Codes,
        apart: OutliersPart | None,
        statistics: Gram,
        layer: Layer,
        order: Tensor | None,
    ) -> list[WeightPart]:
        """Return the parts, after rounds of refinement of the codes for what the outliers leave."""
        dense_part = weight if apart is None else weight - apart.dense(torch.float32)
        if self.refine:
            codes = refined(
                dense_part,
                codes,
                statistics.damped(self.regularization, order),
                self.refine,
                layer.storage,
                order=order,
            )
        return [CodesPart.of(codes), *([] if apart is None else [apart])]

    def gain(self, weight: Float[Tensor, "out in"], importance: Float[Tensor, " in"]) -> Float[Tensor, "out in"]:
        """The decrease of the weighted squared error of its group without each weight, whose range is free again."""
        size = self._size
        groups = weight.reshape(len(weight), -1, size)
        weights = importance.view(-1, size)
        group_error = self._group_error(groups, weights)
        gains = [
            group_error - self._group_error(_without(groups, place), _without(weights, place)) for place in range(size)
        ]
        return torch.stack(gains, dim=-1).view(weight.shape)

    def _group_error(self, groups: Tensor, weights: Tensor) -> Float[Tensor, "out groups"]:
        """Return the weighted squared error of each group, with the whole range and a scale in floats."""
        low, high = (end[..., None] for end in torch.aminmax(groups, dim=-1))
        step = divided(high - low, self.grid.span).clamp(min=torch.finfo(torch.float32).tiny)
        rounded = ((groups - low) / step).round_().mul_(step).add_(low)
        return rounded.sub_(groups).square_().mul_(weights).sum(-1)


def _without(values: Tensor, place: int) -> Tensor:
    """Return the values of the last axis without one."""
    return torch.cat([values[..., :place], values[..., place + 1 :]], dim=-1)


class _KeepSome:
    """A column rule that rounds with an inner rule, and leaves chosen weights as floats of a dtype."""

    def __init__(self, inner: Rounding, chosen: Bool[Tensor, "out in"], dtype: str, order: Tensor | None) -> None:
        self.inner, self.dtype = inner, DTYPES[dtype]
        self.chosen = (chosen if order is None else chosen[:, order]).T.contiguous()

    def starts(self, width: int) -> Sequence[int]:
        return self.inner.starts(width)

    def open(self, column: int, remaining: Float[Tensor, "rest out"]) -> None:
        self.inner.open(column, remaining)

    def compress(self, column: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        rounded: Any = self.inner.compress(column, values)
        return torch.where(self.chosen[column], values.to(self.dtype).float(), rounded)
