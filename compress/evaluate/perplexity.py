"""Perplexity: exp of the mean next-token loss over non-overlapping windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from jaxtyping import Int
from torch import Tensor, nn

from compress.errors import NumericError
from compress.stream.depth import total_loss


@dataclass(frozen=True)
class Perplexity:
    """loss: mean next-token loss in nats over all windows' targets. tokens: how many targets. seconds: wall time."""

    loss: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss), infinity when that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def perplexity(
    model: nn.Module, ids: Int[Tensor, "windows length"], progress: Callable[[int, int], None] | None = None
) -> Perplexity:
    """Mean loss of each token given those before it in its window; the first of each window has no loss.

    progress(done, of) is called after every window.

    Raises NumericError when a loss is NaN.
    """
    total, tokens, begin = 0.0, 0, perf_counter()
    for i, window in enumerate(ids):
        total += total_loss(model, window)
        tokens += len(window) - 1
        if math.isnan(total):
            raise NumericError(f"the model's loss is NaN on window {i} of the evaluation text")
        if progress is not None:
            progress(i + 1, len(ids))
    return Perplexity(total / tokens, tokens, perf_counter() - begin)
