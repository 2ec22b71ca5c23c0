"""Allocation of sparsity to layers: from outlier ratios, from one global threshold, or from measured errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

DROPPED = 12  # low bits of a float32 that a histogram ignores; 11 bits of mantissa remain, as many as float16 has


def outlier_weighed(
    ratios: Mapping[str, float], sizes: Mapping[str, int], sparsity: float, most: float
) -> dict[str, float]:
    """Sparsities that are lower where the outlier ratio is higher (OWL, Yin 2023, section 4.1; reference code).

    Densities are the ratios, stretched to an interval of length 2 * most and shifted so that their mean, weighted by
    size, is 1 - sparsity.

    Raises ValueError when a layer would keep no weights or all of them.
    """
    low, high = min(ratios.values()), max(ratios.values())
    stretch = 2 * most / (high - low) if high > low else 0.0
    densities = {name: (ratio - low) * stretch for name, ratio in ratios.items()}
    mean = sum(densities[name] * size for name, size in sizes.items()) / sum(sizes.values())
    found = {name: sparsity - (density - mean) for name, density in densities.items()}
    worst = max(found.values(), key=lambda value: abs(value - 0.5))
    if not 0 < worst < 1:
        raise ValueError(f"a layer would get a sparsity of {worst:.3g} from sparsity {sparsity:g} and lambda {most:g}")
    return found


@dataclass(frozen=True)
class Histogram:
    """Counts of scores by value, with the low bits of a float32 dropped. bins: ascending."""

    bins: Int[Tensor, " n"]
    counts: Int[Tensor, " n"]

    @classmethod
    def of(cls, scores: Float[Tensor, " units"]) -> Histogram:
        """The histogram of scores; scores below zero count as zero."""
        bits = scores.float().clamp(min=0).view(torch.int32) >> DROPPED  # ascending with the scores
        counts = torch.bincount(bits)
        bins = counts.nonzero()[:, 0]
        return cls(bins.to(torch.int32), counts[bins])

    @property
    def total(self) -> int:
        """The number of scores."""
        return int(self.counts.sum())


def below_threshold(histograms: Mapping[str, Histogram], sparsity: float) -> dict[str, int]:
    """Count the scores of each layer below the global threshold; the fraction `sparsity` of all scores lies below it.

    The total is exact. Scores in the threshold's own bin are allocated to the layers in proportion to how many of them
    each layer has.
    """
    wanted = round(sparsity * sum(h.total for h in histograms.values()))
    together = torch.zeros(1 << (31 - DROPPED), dtype=torch.int64)
    for histogram in histograms.values():
        together[histogram.bins.long()] += histogram.counts.cpu()
    # the first bin at whose end at least `wanted` scores are counted
    cut = int(torch.searchsorted(together.cumsum(0), wanted))
    below = {name: int(h.counts[h.bins < cut].sum()) for name, h in histograms.items()}
    at = {name: int(h.counts[h.bins == cut].sum()) for name, h in histograms.items()}
    parts = in_proportion(wanted - sum(below.values()), list(at.values()))
    return {name: below[name] + part for name, part in zip(below, parts, strict=True)}


def in_proportion(total: int, weights: Sequence[int]) -> list[int]:
    """Integers that sum to `total`, in proportion to the weights, none above its weight (largest remainders)."""
    whole = sum(weights)
    if whole == 0:
        return [0] * len(weights)
    parts = [total * weight // whole for weight in weights]
    rests = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in rests[: total - sum(parts)]:
        parts[i] += 1
    return parts


Curve = Sequence[tuple[float, float]]
"""(sparsity, error) with ascending sparsities."""


def least_error(curves: Mapping[str, Curve], sizes: Mapping[str, int], sparsity: float) -> dict[str, float]:
    """The sparsities with the least total error whose mean, weighted by size, is `sparsity`.

    Each curve is replaced by its lower convex envelope, linear between its points. On it, the steps with the least
    error per removed weight, taken in that order, are the optimum (a Lagrange multiplier is the slope at which they
    end).
    """
    hulls = {name: envelope(curve) for name, curve in curves.items()}
    found = {name: hull[0][0] for name, hull in hulls.items()}
    steps = [
        ((right[1] - left[1]) / ((right[0] - left[0]) * sizes[name]), name, left[0], right[0])
        for name, hull in hulls.items()
        for left, right in pairwise(hull)
    ]
    left = sparsity * sum(sizes.values()) - sum(found[name] * size for name, size in sizes.items())
    for _, name, start, stop in sorted(steps):
        count = min((stop - start) * sizes[name], left)
        found[name] = stop if count < left else start + count / sizes[name]
        left -= count
        if left <= 0:
            break
    return found


def envelope(curve: Curve) -> list[tuple[float, float]]:
    """The lower convex envelope of points with ascending sparsities."""
    hull: list[tuple[float, float]] = []
    for point in curve:
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _turns_down(one: tuple[float, float], two: tuple[float, float], three: tuple[float, float]) -> bool:
    """Whether the middle point is on or above the line between the others."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in ((one, two), (two, three))]
    return slopes[0] >= slopes[1]


def ladder(sparsity: float, within: float, points: int) -> list[float]:
    """Evenly spaced sparsities from sparsity - within to sparsity + within, at most half the way to 0 or 1."""
    low, high = max(sparsity - within, sparsity / 2), min(sparsity + within, (1 + sparsity) / 2)
    return [low + (high - low) * i / (points - 1) for i in range(points)]
