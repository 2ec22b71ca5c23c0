"""Histograms of a tensor before and after a change, in equal bins."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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


def histogram(original: Tensor, changed: Tensor) -> Histogram | None:
    """Count at most `SAMPLE` values of each tensor; return None if a value is not finite."""
    sizes = [
        float(torch.stack(values.aminmax()).abs().max()) for values in (original, changed)
    ]  # abs() copies a tensor
    if not all(map(math.isfinite, sizes)):
        return None
    limit = max(sizes) or 1.0
    return Histogram(limit, _counts(original, limit), _counts(changed, limit))


def _counts(values: Tensor, limit: float) -> list[int]:
    flat = values.reshape(-1)
    sample = flat[:: -(-flat.numel() // SAMPLE)].float()
    return [int(count) for count in torch.histc(sample, BINS, -limit, limit).tolist()]
