"""Statistics of measurements: standard errors, paired differences, and tests on the same items."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

NORMAL_95 = 1.959963984540054  # the 97.5% quantile of the normal distribution
JACKKNIFE_GROUPS = 50


class Estimate(NamedTuple):
    """A value and its standard error; None where the sample has one item or no error is known."""

    value: float
    stderr: float | None


class Flips(NamedTuple):
    """Items that only the second of two models answers right, only the first, and both or neither."""

    gained: int
    lost: int
    same: int


def mean(values: Sequence[float]) -> Estimate:
    """The mean, and its standard error sqrt(variance / n) with the unbiased variance."""
    count = len(values)
    middle = sum(values) / count
    if count < 2:
        return Estimate(middle, None)
    variance = sum((value - middle) ** 2 for value in values) / (count - 1)
    return Estimate(middle, math.sqrt(variance / count))


def ratio(totals: Sequence[float], counts: Sequence[float]) -> Estimate:
    """sum(totals) / sum(counts) over clusters, and its standard error with a cluster as the unit of sampling.

    Cochran 1977, Sampling Techniques, section 6.4 (large populations):
    var = sum (t_i - r c_i)^2 * n / ((n - 1) * (sum c)^2).
    """
    number, total = len(totals), sum(counts)
    found = sum(totals) / total
    if number < 2:
        return Estimate(found, None)
    squares = sum((t - found * c) ** 2 for t, c in zip(totals, counts, strict=True))
    return Estimate(found, math.sqrt(squares * number / (number - 1)) / total)


def flips(first: Sequence[float], second: Sequence[float]) -> Flips:
    """Count the items that only one of two models answers right; answers are 0 or 1."""
    gained = sum(b > a for a, b in zip(first, second, strict=True))
    lost = sum(b < a for a, b in zip(first, second, strict=True))
    return Flips(gained, lost, len(first) - gained - lost)


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p-value of McNemar's test: the flips are fair coins under the null hypothesis."""
    count = gained + lost
    tail = sum(math.comb(count, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << count))


def difference_interval(found: Flips) -> tuple[float, float]:
    """The 95% interval of the difference of two accuracies on the same items, second minus first.

    Agresti and Min 2005 (Statistics in Medicine 24): the Wald interval after half an item was added to each of the four
    cells, so that few or no flips do not give an interval without width.
    """
    gained, lost, count = found.gained + 0.5, found.lost + 0.5, sum(found) + 2
    middle = (gained - lost) / count
    spread = math.sqrt(gained + lost - (gained - lost) ** 2 / count) / count
    return max(-1.0, middle - NORMAL_95 * spread), min(1.0, middle + NORMAL_95 * spread)


def jackknife(statistic: Callable[[Sequence[Any]], float], items: Sequence[Any]) -> float | None:
    """The standard error of any statistic by the delete-a-group jackknife; None for one item.

    var = (g - 1) / g * sum (theta_-j - mean)^2 over g groups of items that are left out in turn.
    """
    groups = min(JACKKNIFE_GROUPS, len(items))
    if groups < 2:
        return None
    left = [statistic([item for i, item in enumerate(items) if i % groups != j]) for j in range(groups)]
    middle = sum(left) / groups
    return math.sqrt((groups - 1) / groups * sum((value - middle) ** 2 for value in left))


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile of a sample, by linear interpolation between the order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation; equal values share their mean rank. None where all values of a side are equal."""
    both = [ranks(values) - (len(values) + 1) / 2 for values in (first, second)]
    size = math.sqrt(float((both[0] ** 2).sum()) * float((both[1] ** 2).sum()))
    return float((both[0] * both[1]).sum()) / size if size else None


def ranks(values: Sequence[float]) -> Any:
    """The ranks of values from 1, a numpy array; equal values share their mean rank."""
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]
