"""Gradual magnitude pruning: the sparsity follows a cubic schedule during training (Zhu & Gupta 2017)."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from compress.layers.linear import CompressedLinear
from compress.numerics.sparse.schedules import Cubic
from compress.passes.families.training import SparseTrainingPass
from compress.train.parametrization import Parametrization, Shares, Shrinking


class GMP(SparseTrainingPass):
    """Train, and prune the smallest weights gradually: many in the first steps, few in the last.

    The sparsity follows equation 1 of the paper. Removed weights get no gradient and stay zero. Weights that earlier
    passes removed count as removed.

    `pattern` sets which magnitudes are compared. With an N:M pattern the sparsity is the mean over all groups of M: a
    growing number of groups keeps only N weights, first the groups that lose the least magnitude.
    """

    use_for: ClassVar[str] = "50% zeros and more by training, with much text and many steps."
    not_for: ClassVar[str] = (
        "Little text or little time: sparsegpt, then distill with the mask fixed, is far better after few steps."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/1710.01878"

    initial: float = Field(default=0.0, ge=0, lt=1, description="sparsity at the start of the schedule")
    begin: float = Field(default=0.0, ge=0, lt=1, description="fraction of the steps before the schedule starts")
    end: float = Field(
        default=0.75, gt=0, le=1, description="fraction of the steps after which the sparsity is reached"
    )
    every: int = Field(default=1, ge=1, description="steps between two increases of the sparsity")

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.end <= self.begin:
            raise ValueError(f"the schedule ends ({self.end:g} of the steps) before it begins ({self.begin:g})")
        if self.initial >= self.target_sparsity:
            raise ValueError(
                f"sparsity {self.target_sparsity:g} is not above initial {self.initial:g}; lower initial, or use "
                "finetune to train at a fixed sparsity"
            )

    def parametrize(self, name: str, layer: CompressedLinear) -> Parametrization:
        return _Gradual(self, layer)

    def growth(self, steps: int) -> Cubic:
        """Return the schedule of the sparsity over a number of steps."""
        initial = min(self.initial, self.target_sparsity)  # an allocation may ask less of a layer
        return Cubic(initial, self.target_sparsity, round(self.begin * steps), round(self.end * steps), self.every)


class _Gradual(Shrinking):
    """The mask shrinks according to the schedule."""

    def __init__(self, step: GMP, layer: CompressedLinear) -> None:
        super().__init__(layer)
        self.step = step

    def update(self, weight: nn.Parameter, step: int, total_steps: int) -> Shares:
        schedule = self.step.growth(total_steps)
        if schedule.due(step):
            self.shrink(weight, self.step.pattern, schedule.at(step))
        return super().update(weight, step, total_steps)

    def ready(self, step: int, total_steps: int) -> bool:
        return step >= self.step.growth(total_steps).last
