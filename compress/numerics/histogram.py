"""Histograms of a tensor before and after a change, in equal bins."""

from __future__ import annotations

from dataclasses import dataclass

BINS = 49  # odd: zero is in the middle of a bin
SAMPLE = 1 << 16  # numbers that are counted of each tensor, evenly spaced


@dataclass(frozen=True)
class Histogram:
    """Counts of values in `BINS` equal bins from -limit to limit.

    Attributes:
        limit: largest magnitude before and after the change.
        before: counts before the change.
        after: counts after the change.
    """

    limit: float
    before: list[int]
    after: list[int]

    @property
    def changed(self) -> bool:
        """Whether the two distributions differ."""
        return self.before != self.after


@dataclass(frozen=True)
class LayerHistograms:
    """Histograms of a layer's weights, and of the inputs that its weights multiply.

    Attributes:
        weights: None if a value is not finite.
        inputs: None without tokens.
    """

    weights: Histogram | None
    inputs: Histogram | None
