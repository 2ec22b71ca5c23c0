"""The work of a run, counted by its kind: operations, numbers and bytes. A rate for each kind gives the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Work:
    """Amounts of work. A multiplication and an addition count as two operations.

    Attributes:
        products: operations of matrix products in forward passes, in the dtype of computation.
        statistics: operations of Hessians, tokens * width^2 (a triangle of X^T X).
        factors: operations of factorizations, n^3 / 3 for a Cholesky factor and as many for its inverse.
        updates: operations of matrix products in solvers.
        columns: weights whose column is decided in a sweep or a descent, one column after the other.
        roundings: weights that are rounded to a grid once.
        scores: weights that are scored and selected once.
        elements: numbers that operations on single numbers read and write.
        installs: weights that are installed in a layer, compared with the original and summarized.
        layers: solved layers.
        stored: bytes of tensors that are read, written, digested and read back.
        runs: starts of a run.
    """

    products: float = 0.0
    statistics: float = 0.0
    factors: float = 0.0
    updates: float = 0.0
    columns: float = 0.0
    roundings: float = 0.0
    scores: float = 0.0
    elements: float = 0.0
    installs: float = 0.0
    layers: float = 0.0
    stored: float = 0.0
    runs: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, kind) + getattr(other, kind) for kind in KINDS))

    def __mul__(self, factor: float) -> Work:
        return Work(*(factor * getattr(self, kind) for kind in KINDS))

    @property
    def amounts(self) -> dict[str, float]:
        """The amounts by kind."""
        return {kind: getattr(self, kind) for kind in KINDS}  # asdict copies, and takes ten times as long


KINDS = tuple(entry.name for entry in fields(Work))
"""The kinds of work."""


def total(works: Mapping[str, Work]) -> Work:
    """Return the sum of all works."""
    return sum(works.values(), Work())
