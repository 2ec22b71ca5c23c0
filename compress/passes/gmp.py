"""Gradual magnitude pruning: sparsity grows along a cubic while the rest is trained (Zhu & Gupta 2017)."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from compress.families.training import SparseTrainingPass
from compress.model.linear import CompressedLinear
from compress.numerics.sparse.schedules import Cubic
from compress.train.parametrization import Parametrization, Shares, Shrinking


class GMP(SparseTrainingPass):
    """Train, and every few steps remove the smallest weights that are left, many at first and few at last.

    The sparsity follows equation 1 of the paper; what is removed gets no gradient and stays zero. Magnitudes are
    compared as the pattern has it. With an N:M pattern the sparsity is that of all groups of M together: more and more
    of them keep N only, those first that lose the least magnitude. What earlier passes removed counts.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/1710.01878"

    initial: float = Field(default=0.0, ge=0, lt=1, description="sparsity at the beginning of the schedule")
    begin: float = Field(default=0.0, ge=0, lt=1, description="share of the steps before the schedule begins")
    end: float = Field(default=0.75, gt=0, le=1, description="share of the steps after which all zeros are there")
    every: int = Field(default=1, ge=1, description="steps between two rises of the sparsity")

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
        """The sparsity over so many steps."""
        return Cubic(self.initial, self.target_sparsity, round(self.begin * steps), round(self.end * steps), self.every)


class _Gradual(Shrinking):
    """The mask shrinks when the schedule says so."""

    def __init__(self, step: GMP, layer: CompressedLinear) -> None:
        super().__init__(layer)
        self.step = step

    def update(self, weight: nn.Parameter, done: int, of: int) -> Shares:
        schedule = self.step.growth(of)
        if schedule.due(done):
            self.shrink(weight, self.step.pattern, schedule.at(done))
        return super().update(weight, done, of)

    def ready(self, done: int, of: int) -> bool:
        return done >= self.step.growth(of).last
