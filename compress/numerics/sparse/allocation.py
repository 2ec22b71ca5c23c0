"""Allocation of sparsity to layers: from outlier ratios, from one global threshold, or from measured errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

DROPPED = 12  # low bits of a float32 that a histogram ignores; 11 bits of mantissa remain, as many as float16 has


def outlier_weighted(
    ratios: Mapping[str, float], sizes: Mapping[str, int], sparsity: float, max_deviation: float
) -> dict[str, float]:
    """Return sparsities that are lower for higher outlier ratios (OWL, Yin 2023, section 4.1; reference code).

    Densities are the ratios, stretched to an interval of length 2 * max_deviation and shifted so that their mean,
    weighted
    by size, is 1 - sparsity.

    Args:
        ratios: outlier ratio of each layer.
        sizes: number of weights of each layer.
        sparsity: mean sparsity.
        max_deviation: half of the range of the densities.

    Raises:
        ValueError: if a layer would keep no weights or all of them.
    """
    low, high = min(ratios.values()), max(ratios.values())
    stretch = 2 * max_deviation / (high - low) if high > low else 0.0
    densities = {name: (ratio - low) * stretch for name, ratio in ratios.items()}
    mean = sum(densities[name] * size for name, size in sizes.items()) / sum(sizes.values())
    sparsities = {name: sparsity - (density - mean) for name, density in densities.items()}
    worst = max(sparsities.values(), key=lambda value: abs(value - 0.5))
    if not 0 < worst < 1:
        raise ValueError(
            f"a layer would get a sparsity of {worst:.3g} from sparsity {sparsity:g} and lambda {max_deviation:g}"
        )
    return sparsities


@dataclass(frozen=True)
class ScoreHistogram:
    """Counts of scores by value, with the low bits of a float32 dropped.

    Attributes:
        bins: the values, ascending.
        counts: number of scores of each bin.
    """

    bins: Int[Tensor, " n"]
    counts: Int[Tensor, " n"]

    @classmethod
    def of(cls, scores: Float[Tensor, " units"]) -> ScoreHistogram:
        """Count scores; scores below zero count as zero."""
        bits = scores.float().clamp(min=0).view(torch.int32) >> DROPPED  # ascending with the scores
        counts = torch.bincount(bits)
        bins = counts.nonzero()[:, 0]
        return cls(bins.to(torch.int32), counts[bins])

    @property
    def total(self) -> int:
        """The number of scores."""
        return int(self.counts.sum())


def below_threshold(histograms: Mapping[str, ScoreHistogram], sparsity: float) -> dict[str, int]:
    """Count the scores of each layer below the global threshold; the fraction `sparsity` of all scores lies below it.

    The total is exact. Scores in the threshold's own bin are allocated to the layers in proportion to how many of them
    each layer has.
    """
    target = round(sparsity * sum(h.total for h in histograms.values()))
    total_counts = torch.zeros(1 << (31 - DROPPED), dtype=torch.int64)
    for histogram in histograms.values():
        total_counts[histogram.bins.long()] += histogram.counts.cpu()
    # the first bin at whose end at least `wanted` scores are counted
    threshold_bin = int(torch.searchsorted(total_counts.cumsum(0), target))
    below = {name: int(h.counts[h.bins < threshold_bin].sum()) for name, h in histograms.items()}
    in_bin = {name: int(h.counts[h.bins == threshold_bin].sum()) for name, h in histograms.items()}
    parts = in_proportion(target - sum(below.values()), list(in_bin.values()))
    return {name: below[name] + part for name, part in zip(below, parts, strict=True)}


def in_proportion(total: int, weights: Sequence[int]) -> list[int]:
    """Return integers that sum to `total`, in proportion to the weights, none above its weight (largest remainders)."""
    total_weight = sum(weights)
    if total_weight == 0:
        return [0] * len(weights)
    parts = [total * weight // total_weight for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % total_weight), i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


Curve = Sequence[tuple[float, float]]
"""(sparsity, error) with ascending sparsities."""


def least_error(curves: Mapping[str, Curve], sizes: Mapping[str, int], sparsity: float) -> dict[str, float]:
    """Return the sparsities with the least total error whose mean, weighted by size, is `sparsity`.

    Each curve is replaced by its lower convex envelope, linear between its points. On it, the steps with the least
    error per removed weight, taken in that order, are the optimum (a Lagrange multiplier is the slope at which they
    end).
    """
    hulls = {name: envelope(curve) for name, curve in curves.items()}
    sparsities = {name: hull[0][0] for name, hull in hulls.items()}
    steps = [
        ((end[1] - remaining[1]) / ((end[0] - remaining[0]) * sizes[name]), name, remaining[0], end[0])
        for name, hull in hulls.items()
        for remaining, end in pairwise(hull)
    ]
    remaining = sparsity * sum(sizes.values()) - sum(sparsities[name] * size for name, size in sizes.items())
    for _, name, start, stop in sorted(steps):
        count = min((stop - start) * sizes[name], remaining)
        sparsities[name] = stop if count < remaining else start + count / sizes[name]
        remaining -= count
        if remaining <= 0:
            break
    return sparsities


def envelope(curve: Curve) -> list[tuple[float, float]]:
    """Return the lower convex envelope of points with ascending sparsities."""
    hull: list[tuple[float, float]] = []
    for point in curve:
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _turns_down(start: tuple[float, float], middle: tuple[float, float], end: tuple[float, float]) -> bool:
    """Whether the middle point is on or above the line between the others."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in ((start, middle), (middle, end))]
    return slopes[0] >= slopes[1]


def ladder(sparsity: float, max_distance: float, points: int) -> list[float]:
    """Return evenly spaced sparsities around `sparsity`.

    They are at most `max_distance` away and at most half the way to 0 or 1.
    """
    low, high = max(sparsity - max_distance, sparsity / 2), min(sparsity + max_distance, (1 + sparsity) / 2)
    return [low + (high - low) * i / (points - 1) for i in range(points)]
