"""Perplexity: exp of the mean loss of the tokens that a model is asked for, over non-overlapping windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from jaxtyping import Int
from torch import Tensor, nn

from compress.errors import NumericError
from compress.model.prediction import NEXT_TOKENS, Prediction
from compress.stream.depth import total_loss


@dataclass(frozen=True)
class Perplexity:
    """loss: mean loss in nats over all windows' targets. tokens: how many targets. seconds: wall time. of: what the
    targets are, 'next tokens' or 'masked tokens', which cannot be compared with one another.
    """

    loss: float
    tokens: int
    seconds: float
    of: str = NEXT_TOKENS.of

    @property
    def perplexity(self) -> float:
        """exp(loss), infinity when that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def perplexity(
    model: nn.Module,
    ids: Int[Tensor, "windows length"],
    progress: Callable[[int, int], None] | None = None,
    prediction: Prediction = NEXT_TOKENS,
) -> Perplexity:
    """Mean loss of each token given those before it in its window; the first of each window has no loss.

    With another prediction (`prediction_of`): of the masked tokens given the others of their window, under masks that
    depend on the number of the window alone, so that they are the same for every model.
    progress(done, of) is called after every window.

    Raises NumericError when a loss is NaN, ModelError for next tokens of a model that predicts masked ones.
    """
    total, tokens, begin = 0.0, 0, perf_counter()
    for i, window in enumerate(ids):
        loss, count = total_loss(model, window, prediction, i)
        total += loss
        tokens += count
        if math.isnan(total):
            raise NumericError(f"the model's loss is NaN on window {i} of the evaluation text")
        if progress is not None:
            progress(i + 1, len(ids))
    return Perplexity(total / tokens, tokens, perf_counter() - begin, prediction.of)
