"""Choose one of several sizes for each item within a total, so that the sum of errors is small."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from compress.numerics.sparse.allocation import envelope

Options = Mapping[str, tuple[float, float]]
"""choice -> (size, error)."""


def within_budget(items: Mapping[str, Options], budget: float) -> dict[str, str]:
    """The choice for each item: item -> choice. The sizes sum up to at most `budget`.

    All items start at their smallest choice. Steps along the lower convex envelopes of their errors are taken in the
    order of error saved per size, as long as they fit. A step that does not fit is left out, so the result is the
    optimum of the relaxed problem up to one step (multiple-choice knapsack, Sinha and Zoltners 1979).

    Raises ValueError when the smallest choices exceed the budget.
    """
    found: dict[str, str] = {}
    steps: list[tuple[float, str, str, float]] = []
    left = budget
    for item, options in items.items():
        least: dict[float, tuple[float, str]] = {}  # size -> (error, choice)
        for choice, (size, error) in options.items():
            least[size] = min(least.get(size, (error, choice)), (error, choice))
        names = {(size, error): choice for size, (error, choice) in least.items()}
        hull = envelope(sorted(names))
        while len(hull) > 1 and hull[-1][1] >= hull[-2][1]:  # larger, and no better
            hull.pop()
        found[item] = names[hull[0]]
        left -= hull[0][0]
        for before, after in pairwise(hull):
            size = after[0] - before[0]
            steps.append(((after[1] - before[1]) / size, item, names[after], size))
    if left < 0:
        raise ValueError(f"the smallest choices take {budget - left:g}, more than {budget:g}")
    closed: set[str] = set()
    for _, item, choice, size in sorted(steps):
        if size > left or item in closed:
            closed.add(item)  # later steps of the item follow this one
            continue
        found[item] = choice
        left -= size
    return found
