"""Choose one of several sizes for each item within a total, so that the sum of errors is least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Options = Mapping[str, tuple[float, float]]
"""choice -> (size, error)."""

SECONDS = 60
"""Time limit of the solver; it then returns its best choices so far."""


def within_budget(items: Mapping[str, Options], budget: float) -> dict[str, str]:
    """Choose the option of each item so that the sum of errors is least and the sum of sizes is at most `budget`.

    A multiple-choice knapsack problem, solved as an integer program (HiGHS, through scipy); of equal errors the smaller
    size is chosen.

    Returns:
        item -> choice.

    Raises:
        ValueError: if the smallest choices exceed the budget.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # here: the import takes a third of a second

    smallest_total = sum(min(size for size, _ in options.values()) for options in items.values())
    if smallest_total > budget:
        raise ValueError(f"the smallest choices take {smallest_total:g}, more than {budget:g}")
    pairs = [(item, choice) for item, options in items.items() for choice in options]
    sizes = np.array([items[item][choice][0] for item, choice in pairs])
    errors = np.array([items[item][choice][1] for item, choice in pairs])
    row_of_item = {item: row for row, item in enumerate(items)}
    choice_rows = np.zeros((len(items), len(pairs)))
    choice_rows[[row_of_item[item] for item, _ in pairs], range(len(pairs))] = 1
    largest = max(float(np.abs(errors).max()), 1e-300)
    solution = milp(
        errors / largest + 1e-9 * sizes / max(float(sizes.sum()), 1e-300),
        integrality=np.ones(len(pairs)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(choice_rows, 1, 1), LinearConstraint(sizes / budget, -np.inf, 1)],
        options={"time_limit": SECONDS, "mip_rel_gap": 0},
    )
    assert solution.x is not None, "the smallest choices are a solution"
    return {item: choice for (item, choice), value in zip(pairs, solution.x, strict=True) if value > 0.5}


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide a number in proportion to weights, by the largest remainders; of equal ones, the first."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: counts[i] - exact[i])
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts
