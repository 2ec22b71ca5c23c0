"""Perplexity: exp of the mean next-token loss over non-overlapping windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from jaxtyping import Int
from torch import Tensor, nn

from compress.errors import NumericError

ROWS = 128  # positions whose loss is computed at a time: a whole window's log-softmax would double the peak memory


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
    device = next(model.parameters()).device
    total, tokens, begin = 0.0, 0, perf_counter()
    takes_cache = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with torch.no_grad():
        for i, window in enumerate(ids):
            window = window.to(device)
            logits = model(input_ids=window[None], **takes_cache).logits[0]
            for start in range(0, len(window) - 1, ROWS):
                targets = window[start + 1 : start + 1 + ROWS]
                rows = logits[start : start + len(targets)].float()
                total += float(nn.functional.cross_entropy(rows, targets, reduction="sum"))
            tokens += len(window) - 1
            if math.isnan(total):
                raise NumericError(f"the model's loss is NaN on window {i} of the evaluation text")
            if progress is not None:
                progress(i + 1, len(ids))
    return Perplexity(total / tokens, tokens, perf_counter() - begin)
