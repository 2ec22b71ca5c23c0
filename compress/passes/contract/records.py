"""What a run records: the cost of a phase, and the effect of a pass on a layer."""

from __future__ import annotations

from dataclasses import dataclass

from compress.numerics.histogram import LayerHistograms


@dataclass
class PhaseCost:
    """Total time in seconds of a phase, and its peak memory in bytes: of the host, and of the accelerator if any."""

    seconds: float = 0.0
    peak_bytes: int = 0
    device_bytes: int = 0


@dataclass(frozen=True)
class LayerResult:
    """The effect of one pass on one layer.

    Attributes:
        layer: full name of the layer.
        by: label of the pass.
        error: ||(W' - W) X|| / ||W X|| on sampled inputs; None if no token reached the layer.
        sparsity: fraction of zeros after the pass.
        asked: requested sparsity; only for a pruning pass.
        due: requested sparsity in whole units of the pattern; only for a pruning pass.
        histograms: weights and inputs before and after the pass, for the layers of each block with the largest errors.
    """

    layer: str
    by: str
    error: float | None
    sparsity: float
    asked: float | None = None
    due: float | None = None
    histograms: LayerHistograms | None = None
