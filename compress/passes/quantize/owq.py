"""OWQ: GPTQ, but the few input columns with the largest rounding error stay in 16 bits (Lee 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from compress.layers.base import WeightPart
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.outliers import OutliersPart, OutliersScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.column_sweep import sweep
from compress.numerics.quant.rounding import Rounding, rounding_bytes
from compress.passes.contract.facts import Effects
from compress.passes.contract.layers import Layer
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram, Observer
from compress.passes.families.compensation import RegularizedPass
from compress.passes.families.quantizing import QuantizingPass, ScaleOption

VALUE_BITS, INDEX_BITS = 16, 32  # storage of an outlier column: a 16-bit float per row, and its index
BUDGET = 0.1  # section 5: OWQ at 3.1 bits is compared with OPTQ at 4


class OWQ(RegularizedPass, QuantizingPass):
    """Keep the most sensitive input columns in 16 bits, and quantize the others with GPTQ.

    Keep the columns with the largest lambda_j = H_jj ||w_j - Q(w_j)||^2 in 16 bits; round the others by GPTQ.
    The outlier columns are the last columns of the sweep, so they compensate the errors of all others, and no scale
    needs to cover them (sections 3.2 and 3.3 of the paper). Their codes decode to zero.
    """

    use_for: ClassVar[str] = (
        "3 bits with some tenths of a bit to spare: the input columns that rounding harms most stay in 16 bits."
    )
    not_for: ClassVar[str] = "Formats other than native."
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.02272"
    observes: ClassVar[type[Observer]] = Gram

    budget: float = Field(
        default=BUDGET,
        gt=0,
        lt=16,
        description="bits per weight for outlier columns, in addition to the codes; at least one column",
    )
    outlier_dtype: Literal["float16", "bfloat16"] = Field(default="float16", description="dtype of the outlier columns")
    order: Literal["natural", "static"] = Field(
        default="static",
        description="order of the other columns in the sweep; 'static': columns with large inputs first",
    )
    scale: ScaleOption = Field(default="mse", description="scale search, as for gptq; 'mse' clips as in the paper")

    def columns_of(self, shape: tuple[int, int]) -> int:
        """Return the number of outlier columns of a layer (out, in) within the budget, at least one."""
        rows, width = shape
        return max(1, int(self.budget * rows * width / (VALUE_BITS * rows + INDEX_BITS)))

    def effects(self, layer: LayerScheme) -> Effects:
        effects = super().effects(layer)
        outliers = OutliersScheme(self.columns_of(layer.shape), "column", self.outlier_dtype)
        return replace(effects, scheme=effects.scheme.with_parts(*effects.scheme.parts, outliers))

    def memory(self, size: ProblemSize) -> int:
        return super().memory(size) + rounding_bytes(*size.shape)

    def codes(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> list[WeightPart]:
        weight = weight.float()
        chosen = self.weak_columns(weight, statistics, layer)
        is_quantized = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
        is_quantized[chosen] = False
        order = self._order(statistics, is_quantized, chosen)
        factor = statistics.factor_of(layer.name, layer.log, self.regularization, order)
        mask = is_quantized.expand(weight.shape) if layer.mask is None else layer.mask & is_quantized
        rule = _KeepLast(Rounding(weight, self.grid_options(layer), mask, order), weight.shape[1] - len(chosen))
        sweep(weight[:, order], factor, rule)
        values = torch.stack(rule.kept, dim=1)
        values = values if layer.mask is None else values * layer.mask[:, chosen]
        outliers = OutliersPart.of_columns(chosen, values, weight.shape[1], self.outlier_dtype)
        return [CodesPart.of(rule.inner.codes), outliers]

    def weak_columns(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> Int[Tensor, " n"]:
        """Return the indices of the columns with the largest sensitivity, in ascending order."""
        rounded = self.nearest(weight, layer).dense()
        # lambda_j = H_jj ||w_j - Q(w_j)||^2  (equation 4)
        sensitivity = statistics.diagonal * (weight - rounded).square().sum(0)
        return sensitivity.topk(self.columns_of((weight.shape[0], weight.shape[1]))).indices.sort().values

    def _order(self, statistics: Gram, is_quantized: Tensor, chosen: Int[Tensor, " n"]) -> Int[Tensor, " in"]:
        """Return the rounded columns, then the outlier columns."""
        columns = is_quantized.nonzero()[:, 0]
        if self.order == "static":
            columns = columns[statistics.diagonal[columns].argsort(descending=True, stable=True)]
        return torch.cat([columns, chosen])


class _KeepLast:
    """A column rule that rounds the first `count` columns with an inner rule and keeps the others unrounded."""

    def __init__(self, inner: Rounding, count: int) -> None:
        self.inner, self.count = inner, count
        self.kept: list[Tensor] = []

    def starts(self, width: int) -> Sequence[int]:
        return self.inner.starts(width)

    def open(self, column: int, remaining: Float[Tensor, "rest out"]) -> None:
        self.inner.open(column, remaining)

    def compress(self, column: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        rounded = self.inner.compress(column, values)  # zeros for outlier columns, because of the mask
        if column < self.count:
            return rounded
        self.kept.append(values.clone())
        return values
