"""QuantEase: coordinate descent over the columns of a weight, with a few weights as floats if asked (Behdin 2023)."""

from __future__ import annotations

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
from compress.numerics.quant.codes import Codes, quantize, spread, store
from compress.numerics.quant.refine import descend, refine_bytes
from compress.passes.contract.facts import Effects
from compress.passes.contract.layers import Layer
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.families.codebooks import Outliers
from compress.passes.families.compensation import CompensatingPass
from compress.passes.families.quantizing import QuantizingPass, ScaleOption

ITERATIONS = 25  # section 5: the default of the paper's experiments
RELAXED = 3  # section 3.2: every third iteration takes the best values without rounding them


class QuantEase(CompensatingPass, QuantizingPass):
    """Choose the columns of the rounded weight in turns, each the best one given all others.

    Minimize ||W X - Q X||^2 by cyclic coordinate descent. The best value of column j, given the others, is q_j + (W -
    Q) H_j / H_jj, and it is rounded to the grid (algorithm 1). Q starts as W. In every third iteration the best values
    are not rounded, which leaves a local minimum; the last iterations round them. Scales are found before.

    outliers: W is approximated by Q + S, with S zero but for a fraction of the weights (algorithm 3). After each
    iteration S takes a step of gradient descent, of which the largest entries stay (iterative hard thresholding).
    """

    use_for: ClassVar[str] = (
        "Hessians that are hard to invert, because the method has no inverse and no factorization. Outliers in 16 bits."
    )
    not_for: ClassVar[str] = (
        "Short runs: each iteration takes as long as the sweep of gptq, whose refine does the same from a better start."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2309.01885"

    scale: ScaleOption = Field(
        default="mse", description="scale search, as for rtn; the paper covers the range: absmax"
    )
    iterations: int = Field(default=ITERATIONS, ge=1, le=1000, description="times that all columns are chosen")
    relaxed: int | None = Field(
        default=RELAXED,
        ge=2,
        description="every so many iterations do not round, except for the last two; null: all iterations round",
    )
    order: Literal["natural", "static"] = Field(
        default="natural", description="order of the columns; 'static': columns with large inputs first"
    )
    outliers: float = Field(default=0.0, ge=0, lt=0.5, description="fraction of the weights that stay floats")
    outlier_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float16", description="with outliers: their dtype"
    )

    def without_effect(self) -> dict[str, str]:
        idle = {} if self.outliers else {"outlier_dtype": "with outliers: 0; leave it out"}
        return super().without_effect() | idle

    @property
    def _kept(self) -> Outliers:
        return Outliers(self.outliers, self.outlier_dtype)

    def effects(self, layer: LayerScheme) -> Effects:
        effects, count = super().effects(layer), self._kept.count(layer.shape)
        if not count:
            return effects
        outliers = OutliersScheme(count, "position", self.outlier_dtype)
        return replace(effects, scheme=effects.scheme.with_parts(*effects.scheme.parts, outliers))

    def memory(self, size: ProblemSize) -> int:
        return super().memory(size) + 2 * refine_bytes(*size.shape)

    def codes(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> Codes | list[WeightPart]:
        order = torch.arange(weight.shape[1], device=weight.device)
        if self.order == "static":
            order = statistics.diagonal.argsort(descending=True, stable=True)
        statistics.factor_of(layer.name, layer.log, self.regularization)  # journals what is odd about the Hessian
        weight, hessian = self.fitted(weight.float(), statistics), statistics.damped(self.regularization)
        weight = weight if layer.mask is None else weight * layer.mask
        chosen = self._kept.choose(weight.abs(), layer.mask)
        options = self.grid_options(layer)
        # no scale needs to cover the largest weights
        scales = quantize(
            weight * ~chosen,
            options.grid,
            options.group_size,
            options.symmetric,
            options.search,
            layer.mask,
            options.dtype,
            options.shared_absmax,
            signed=options.signed,
        )
        rule = _ColumnRounding(scales, layer, order)
        apart = weight * chosen
        rate = 1 / float(torch.linalg.eigvalsh(hessian)[-1]) if self._kept.count(weight.shape) else 0.0
        rounded = weight - apart
        for iteration in range(1, self.iterations + 1):
            rule.rounds = not self.relaxed or iteration % self.relaxed != 0 or iteration > self.iterations - 2
            rounded = descend(weight - apart, rounded, hessian, order, rule)
            if rate and iteration < self.iterations:
                # S + (W - Q - S) H / lambda_max: half of the gradient, by half of its Lipschitz constant
                moved = torch.addmm(apart, weight - rounded - apart, hessian, alpha=rate)
                chosen = self._kept.choose(moved.abs(), layer.mask)
                apart = moved * chosen
        if not rate:
            return rule.codes
        return [CodesPart.of(rule.codes), OutliersPart.of_positions(apart, chosen, self.outlier_dtype)]


class _ColumnRounding:
    """The rule of a column: round it to fixed scales, or not; pruned weights stay zero."""

    def __init__(self, start: Codes, layer: Layer, order: Int[Tensor, " in"]) -> None:
        self.start, self.order, self.rounds = start, order, True
        self.scale = self._by_column(start.scale)
        self.zero = None if start.zero is None else self._by_column(start.zero)
        self.keep = None if layer.mask is None else layer.mask[:, order].T
        self._codes = torch.empty(start.codes.T.shape, device=start.scale.device)

    def _by_column(self, per_group: Tensor) -> Float[Tensor, "in out"]:
        columns = spread(per_group, len(self.order), self.start.group_size).expand(self.start.shape)
        return columns[:, self.order].T.contiguous()

    def __call__(self, place: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        values = values if self.keep is None else values * self.keep[place]
        if not self.rounds:
            return values
        scale, zero = self.scale[place], None if self.zero is None else self.zero[place]
        self._codes[place] = self.start.grid.encode(values, scale, zero)
        return self.start.grid.decode(self._codes[place], scale, zero)

    @property
    def codes(self) -> Codes:
        """The codes of the last iteration that rounded."""
        return replace(self.start, codes=store(self._codes.T[:, self.order.argsort()], self.start.grid))
