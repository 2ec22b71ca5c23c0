"""Choose one of several sizes for each item within a total, so that the sum of errors is least."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Options = Mapping[str, tuple[float, float]]
"""choice -> (size, error)."""

SECONDS = 60
"""After so long, the best choices so far are taken."""


def within_budget(items: Mapping[str, Options], budget: float) -> dict[str, str]:
    """The choice for each item: item -> choice. The sizes sum up to at most `budget`, and the errors are least.

    A multiple-choice knapsack problem, solved as an integer program (HiGHS, through scipy); of equal errors the smaller
    size is chosen.

    Raises ValueError when the smallest choices exceed the budget.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # here: the import takes a third of a second

    least = sum(min(size for size, _ in options.values()) for options in items.values())
    if least > budget:
        raise ValueError(f"the smallest choices take {least:g}, more than {budget:g}")
    pairs = [(item, choice) for item, options in items.items() for choice in options]
    sizes = np.array([items[item][choice][0] for item, choice in pairs])
    errors = np.array([items[item][choice][1] for item, choice in pairs])
    owners = {item: row for row, item in enumerate(items)}
    once = np.zeros((len(items), len(pairs)))
    once[[owners[item] for item, _ in pairs], range(len(pairs))] = 1
    largest = max(float(np.abs(errors).max()), 1e-300)
    found = milp(
        errors / largest + 1e-9 * sizes / max(float(sizes.sum()), 1e-300),
        integrality=np.ones(len(pairs)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(sizes / budget, -np.inf, 1)],
        options={"time_limit": SECONDS, "mip_rel_gap": 0},
    )
    assert found.x is not None, "the smallest choices are a solution"
    return {item: choice for (item, choice), taken in zip(pairs, found.x, strict=True) if taken > 0.5}
