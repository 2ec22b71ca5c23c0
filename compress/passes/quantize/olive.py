"""OliVe: outliers take the place of their neighbours, so that all weights have 4 bits (Guo 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.layers.parts.pairs import PairsPart, PairsScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.column_sweep import sweep
from compress.numerics.quant.codes import spread
from compress.numerics.quant.pairs import FIRST, SECOND, encode, fit, fit_bytes, kinds, quantized, rounded
from compress.numerics.quant.rounding import rounding_bytes
from compress.passes.contract.facts import Effects, Fact
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram, Nothing, Observer
from compress.passes.contract.passes import LayerPass
from compress.passes.families.compensation import Regularized
from compress.passes.families.weight_grid import GroupSizeOption


class Olive(Regularized, LayerPass):
    """Store weights in 4 bits; an outlier also takes the bits of its neighbor, which becomes zero.

    Neighboring columns form pairs (section 3 of the paper).

    - Without an outlier, both weights of the pair are integers from -7 to 7.
    - With an outlier, the other weight, the victim, is zero, and its code marks the pair. The outlier is a float of 4
      bits from 12 to 96.

    Each pair is of the kind with the least squared error; the scale of a group has the least squared error of all its
    pairs. Outliers need no positions, unlike sparse ones.

    `compensate` adds the sweep of GPTQ, which the paper does not have. The paper also quantizes activations this way,
    for its own hardware; here only weights are quantized.
    """

    use_for: ClassVar[str] = (
        "Exactly 4 bits with one scale per row, where rows have outliers and calibration text is scarce."
    )
    not_for: ClassVar[str] = "Groups of 128 and smaller, where gptq on int4 loses less. Programs other than compress."
    paper: ClassVar[str] = "https://arxiv.org/abs/2304.07493"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    group_size: GroupSizeOption = Field(
        default="channel", description="columns that share a scale, an even number; 'channel': a whole row, 'tensor'"
    )
    compensate: bool = Field(
        default=False, description="compensate the error of each column in later columns, as gptq does; needs text"
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if isinstance(self.group_size, int) and self.group_size % 2:
            raise ValueError(f"group_size {self.group_size} splits a pair; write an even number")

    def without_effect(self) -> dict[str, str]:
        idle = () if self.compensate else ("damping", "shrinkage")
        return super().without_effect() | dict.fromkeys(idle, "with compensate: false; leave it out")

    @property
    def observer(self) -> type[Observer]:
        return Gram if self.compensate else Nothing

    def effects(self, layer: LayerScheme) -> Effects:
        return replace(super().effects(layer), scheme=layer.with_parts(PairsScheme(self.group_size)))

    def memory(self, size: ProblemSize) -> int:
        fitted = fit_bytes(*size.shape, self.group_size)
        return super().memory(size) + fitted + (rounding_bytes(*size.shape) if self.compensate else 0)

    def solve(self, weight: Float[Tensor, "out in"], statistics: Any, layer: Layer) -> Solution:
        weight = weight.float() if layer.mask is None else weight.float() * layer.mask
        scale = fit(weight, self.group_size, layer.storage)
        if not self.compensate:
            return Solution([PairsPart.of(quantized(weight, scale, self.group_size), scale, self.group_size)])
        factor = statistics.factor_of(layer.name, layer.log, self.regularization)
        rule = _Pairs(spread(scale, weight.shape[1], self.group_size).expand(weight.shape), layer)
        sweep(weight, factor, rule, rule.look, span=2)
        codes = encode(torch.stack(rule.levels, dim=1), torch.stack(rule.victims, dim=1))
        return Solution([PairsPart.of(codes, scale, self.group_size)])


class _Pairs:
    """The column rule: decide the kind of a pair when the sweep reaches it, then round its two columns."""

    def __init__(self, scale: Float[Tensor, "out in"], layer: Layer) -> None:
        self.scale = scale.T
        self.keep = None if layer.mask is None else layer.mask.T
        self.levels: list[Tensor] = []
        self.victims: list[Tensor] = []

    def starts(self, width: int) -> Sequence[int]:
        return [0]

    def open(self, column: int, remaining: Float[Tensor, "rest out"]) -> None:
        return

    def look(self, column: int, near: Float[Tensor, "span out"]) -> None:
        """Decide the kinds of the pairs of this column and the next one."""
        self._kind = kinds(*(self._scaled(column + i, near[i]) for i in range(2)))

    def _scaled(self, column: int, values: Tensor) -> Tensor:
        values = values / self.scale[column]
        return values if self.keep is None else values * self.keep[column]

    def compress(self, column: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        column_mode, partner_mode = (FIRST, SECOND) if column % 2 == 0 else (SECOND, FIRST)
        level = rounded(self._scaled(column, values), self._kind, column_mode)
        self.levels.append(level)
        self.victims.append(self._kind == partner_mode)
        return level * self.scale[column]
