"""Statistics of measurements: standard errors, paired differences, and tests on the same items."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

NORMAL_95 = 1.959963984540054  # the 97.5% quantile of the normal distribution
JACKKNIFE_GROUPS = 50


class Estimate(NamedTuple):
    """A value and its standard error.

    Attributes:
        value: the value.
        stderr: the standard error; None for a sample of one item, or if it is not known.
    """

    value: float
    stderr: float | None


class Flips(NamedTuple):
    """Changes of the answers of a candidate model against a baseline.

    Attributes:
        gained: items that only the candidate answers right.
        lost: items that only the baseline answers right.
        same: items that both answer right, or both wrong.
    """

    gained: int
    lost: int
    same: int


def student_95(count: int) -> float:
    """Return the 97.5% quantile of Student's t distribution for the mean of `count` values: half of a 95% interval.

    Args:
        count: number of values, 2 or more; the distribution has count - 1 degrees of freedom.
    """
    return float(stdtrit(count - 1, 0.975))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of several tests, so that the chance of any false positive stays that of one test.

    Holm 1979 (Scandinavian Journal of Statistics 6): the i-th smallest of m values is multiplied by m - i + 1; adjusted
    values do not decrease.
    """
    adjusted, largest = [1.0] * len(p_values), 0.0
    for position, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - position)))
        adjusted[index] = largest
    return adjusted


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean and its standard error sqrt(variance / n) with the unbiased variance."""
    count = len(values)
    middle = sum(values) / count
    if count < 2:
        return Estimate(middle, None)
    variance = sum((value - middle) ** 2 for value in values) / (count - 1)
    return Estimate(middle, math.sqrt(variance / count))


def ratio(totals: Sequence[float], counts: Sequence[float]) -> Estimate:
    """Return sum(totals) / sum(counts) over clusters, and its standard error with a cluster as the unit of sampling.

    Cochran 1977, Sampling Techniques, section 6.4 (large populations):
    var = sum (t_i - r c_i)^2 * n / ((n - 1) * (sum c)^2).
    """
    clusters, total = len(totals), sum(counts)
    estimate = sum(totals) / total
    if clusters < 2:
        return Estimate(estimate, None)
    squares = sum((t - estimate * c) ** 2 for t, c in zip(totals, counts, strict=True))
    return Estimate(estimate, math.sqrt(squares * clusters / (clusters - 1)) / total)


def flips(baseline: Sequence[float], candidate: Sequence[float]) -> Flips:
    """Count the items that only one of two models answers right; answers are 0 or 1."""
    gained = sum(b > a for a, b in zip(baseline, candidate, strict=True))
    lost = sum(b < a for a, b in zip(baseline, candidate, strict=True))
    return Flips(gained, lost, len(baseline) - gained - lost)


def mcnemar(gained: int, lost: int) -> float:
    """Return the exact two-sided p-value of McNemar's test: flips are fair coins under the null hypothesis."""
    count = gained + lost
    tail = sum(math.comb(count, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << count))


def difference_interval(counts: Flips) -> tuple[float, float]:
    """Return the 95% interval of the difference of two accuracies on the same items, candidate minus baseline.

    Agresti and Min 2005 (Statistics in Medicine 24): the Wald interval after half an item was added to each of the four
    cells, so that few or no flips do not give an interval without width.
    """
    gained, lost, count = counts.gained + 0.5, counts.lost + 0.5, sum(counts) + 2
    middle = (gained - lost) / count
    spread = math.sqrt(gained + lost - (gained - lost) ** 2 / count) / count
    return max(-1.0, middle - NORMAL_95 * spread), min(1.0, middle + NORMAL_95 * spread)


def jackknife(statistic: Callable[[Sequence[Any]], float], items: Sequence[Any]) -> float | None:
    """Return the standard error of any statistic by the delete-a-group jackknife; None for one item.

    var = (g - 1) / g * sum (theta_-j - mean)^2 over g groups of items that are omitted in turn.
    """
    groups = min(JACKKNIFE_GROUPS, len(items))
    if groups < 2:
        return None
    values = [statistic([item for i, item in enumerate(items) if i % groups != j]) for j in range(groups)]
    middle = sum(values) / groups
    return math.sqrt((groups - 1) / groups * sum((value - middle) ** 2 for value in values))


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the quantile of a sample, by linear interpolation between the order statistics."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; equal values share their mean rank.

    Returns:
        The correlation; None if all values of one side are equal.
    """
    centered_ranks = [ranks(values) - (len(values) + 1) / 2 for values in (left, right)]
    size = math.sqrt(float((centered_ranks[0] ** 2).sum()) * float((centered_ranks[1] ** 2).sum()))
    return float((centered_ranks[0] * centered_ranks[1]).sum()) / size if size else None


def ranks(values: Sequence[float]) -> Any:
    """Return the ranks of values from 1 as a numpy array; equal values share their mean rank."""
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]
