"""Requested, expected and counted sparsity of layers."""

from __future__ import annotations

from typing import Any, ClassVar

from compress.results.measurements.base import Measurement, Record


class LayerSparsity(Record):
    """Fractions of zeros of a layer.

    Attributes:
        asked: The requested sparsity.
        due: The expected sparsity: in whole units of the pattern, without its dense tail.
        achieved: Zeros counted in the checkpoint.
    """

    asked: float
    due: float
    achieved: float


class SparsityResult(LayerSparsity):
    """Means over all pruned layers, weighted by their size, and the fractions of each layer."""

    layers: dict[str, LayerSparsity]


class SparsityMeasurement(Measurement):
    """The sparsity of pruned layers."""

    value_type: ClassVar[Any] = SparsityResult
