"""Allocations: the distribution of a sparsity over the layers of a model; values of `allocate` of a pruning pass.

Each allocation is a frozen value. It reads the model through a survey, which the sweep runs before the first solver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer
from torch import Tensor

from compress.errors import TargetError, did_you_mean
from compress.layers.linear import CompressedLinear
from compress.numerics.metrics import relative_error
from compress.numerics.sparse.allocation import ScoreHistogram, below_threshold, ladder, least_error, outlier_weighted
from compress.numerics.sparse.masks import Pattern
from compress.passes.contract.layers import Layer, Solution, Surveyed
from compress.passes.contract.observers import InputNorm, Nothing, Observer
from compress.passes.contract.options import OptionError, option_error
from compress.passes.contract.passes import Survey

POINTS = 7  # number of sparsities at which a layer's error is measured


class Prunes(Protocol):
    """The interface of a pruning pass that an allocation uses."""

    observes: ClassVar[type[Observer]]  # the statistics of a layer's inputs that its scores need
    pattern: Pattern

    @property
    def target_sparsity(self) -> float:
        """The requested sparsity."""
        ...

    def ranks(self, weight: Float[Tensor, "out in"], statistics: Any, layer: Layer) -> Float[Tensor, "out in"]:
        """Return the score of each weight; negative where it is already removed."""
        ...

    def prune(self, weight: Float[Tensor, "out in"], statistics: Any, layer: Layer, sparsity: float) -> Solution:
        """Prune the layer to a sparsity."""
        ...


class Allocation(BaseModel, ABC):
    """A distribution of the sparsity: the mean over the layers, weighted by size, is the sparsity of the pass."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    key: ClassVar[str]

    @abstractmethod
    def survey(self, step: Prunes) -> Survey | None:
        """Return the survey that decides the sparsity of each layer. None: all layers have the same sparsity."""

    @model_serializer
    def _spell(self) -> str | dict[str, dict[str, Any]]:
        options = {field.alias or name: getattr(self, name) for name, field in type(self).model_fields.items()}
        return {self.key: options} if options else self.key


class Uniform(Allocation):
    """The same sparsity in every layer."""

    key: ClassVar[str] = "uniform"

    def survey(self, step: Prunes) -> Survey | None:
        return None


class Global(Allocation):
    """One threshold for the scores of all layers; weights below it are removed."""

    key: ClassVar[str] = "global"

    def survey(self, step: Prunes) -> Survey:
        return _Threshold(step)


class OWL(Allocation):
    """Blocks with more outliers keep more (Yin 2023, arXiv 2310.05175).

    Outliers are the entries of |W_ij| ||X_j||_2 above M times the mean of their block. The sparsities of blocks lie
    within an interval of 2 lambda.
    """

    key: ClassVar[str] = "owl"

    M: float = Field(default=5.0, gt=0, description="outliers are above M times the mean")
    lambda_: float = Field(default=0.08, gt=0, lt=0.5, alias="lambda", description="half the range of sparsities")

    def survey(self, step: Prunes) -> Survey:
        return _Outliers(step, self)


class SensitivityAllocation(Allocation):
    """Minimize the sum of squared relative errors of the layers' outputs; only one layer is pruned per measurement."""

    key: ClassVar[str] = "sensitivity"

    within: float = Field(default=0.1, gt=0, lt=1, description="largest difference of a layer's sparsity from the mean")

    def survey(self, step: Prunes) -> Survey:
        return _Errors(step, self.within)


ALLOCATIONS: dict[str, type[Allocation]] = {kind.key: kind for kind in (Uniform, Global, OWL, SensitivityAllocation)}
"""Every allocation by its name in a recipe."""


def read_allocation(value: Any) -> Allocation:
    """Read an allocation from a recipe: its name, or {name: {option: value}}.

    Raises OptionError.
    """
    if isinstance(value, Allocation):
        return value
    if isinstance(value, str):
        value = {value: {}}
    if not isinstance(value, Mapping) or len(value) != 1:
        raise OptionError(
            (), f"must be one of {', '.join(ALLOCATIONS)}, or a mapping such as {{owl: {{M: 5, lambda: 0.08}}}}"
        )
    ((key, options),) = value.items()
    if key not in ALLOCATIONS:
        raise OptionError((), f"allocation {key!r} is not known{did_you_mean(str(key), ALLOCATIONS)}")
    try:
        return ALLOCATIONS[key].model_validate({} if options is None else options)
    except ValidationError as error:
        raise option_error(error, ALLOCATIONS[key], (key,)) from error


class _Threshold(Survey):
    """A histogram of every layer's scores, so that only one layer's scores are in memory at a time."""

    def __init__(self, step: Prunes) -> None:
        self.step, self.observer = step, step.observes

    def collect(self, block: Sequence[Surveyed]) -> Mapping[str, ScoreHistogram]:
        pattern = self.step.pattern
        scores = (
            (surveyed.layer.name, self.step.ranks(surveyed.weight, surveyed.statistics, surveyed.layer))
            for surveyed in block
        )
        return {name: ScoreHistogram.of(pattern.units(score)) for name, score in scores}

    def allocate(self, figures: Mapping[str, ScoreHistogram]) -> Mapping[str, float]:
        removed = below_threshold(figures, self.step.target_sparsity)
        return {name: removed[name] / histogram.total for name, histogram in figures.items()}


class _Outliers(Survey):
    """Collect (fraction of outliers in the block, number of weights of the layer) for each layer."""

    observer: type[Observer] = InputNorm

    def __init__(self, step: Prunes, options: OWL) -> None:
        self.step, self.options = step, options

    def collect(self, block: Sequence[Surveyed]) -> Mapping[str, tuple[float, int]]:
        sizes = {surveyed.layer.name: surveyed.module.shape[0] * surveyed.module.shape[1] for surveyed in block}
        total = sum(sizes.values())
        mean = sum(float(_metric(surveyed).sum(dtype=torch.float64)) for surveyed in block) / total
        # D = fraction of entries of |W_ij| ||X_j||_2 above M times their mean  (equation 1)
        outliers = sum(int((_metric(surveyed) > self.options.M * mean).sum()) for surveyed in block)
        return {
            surveyed.layer.name: (outliers / total, prod(self.step.pattern.whole(surveyed.module.shape)))
            for surveyed in block
        }

    def allocate(self, figures: Mapping[str, tuple[float, int]]) -> Mapping[str, float]:
        ratios, sizes = {n: pair[0] for n, pair in figures.items()}, {n: pair[1] for n, pair in figures.items()}
        try:
            return outlier_weighted(ratios, sizes, self.step.target_sparsity, self.options.lambda_)
        except ValueError as error:
            raise TargetError(f"allocate owl: {error}; use a smaller lambda") from error


class _Errors(Survey):
    """Collect (error curve of the layer, number of its weights) for each layer."""

    def __init__(self, step: Prunes, within: float) -> None:
        self.step, self.observer = step, step.observes if step.observes is not Nothing else InputNorm
        self.sparsities = ladder(step.target_sparsity, within, POINTS)

    def collect(self, block: Sequence[Surveyed]) -> Mapping[str, tuple[list[tuple[float, float]], int]]:
        return {
            surveyed.layer.name: (self._curve(surveyed), prod(self.step.pattern.whole(surveyed.module.shape)))
            for surveyed in block
        }

    def _curve(self, surveyed: Surveyed) -> list[tuple[float, float]]:
        weight = surveyed.weight
        rows = torch.eye(weight.shape[1], device=weight.device) if surveyed.rows is None else surveyed.rows.float()
        outputs, curve = rows @ weight.T, []
        for sparsity in self.sparsities:
            solved = self.step.prune(weight, surveyed.statistics, surveyed.layer, sparsity).weight
            assert solved is not None, "a pass that prunes gives a weight"
            pruned = CompressedLinear(solved, None).weight
            curve.append((sparsity, relative_error(rows @ pruned.T, outputs) ** 2))
        return curve

    def allocate(self, figures: Mapping[str, tuple[list[tuple[float, float]], int]]) -> Mapping[str, float]:
        curves, sizes = {n: pair[0] for n, pair in figures.items()}, {n: pair[1] for n, pair in figures.items()}
        return least_error(curves, sizes, self.step.target_sparsity)


def _metric(surveyed: Surveyed) -> Float[Tensor, "out in"]:
    return surveyed.weight.abs() * surveyed.statistics.norm
