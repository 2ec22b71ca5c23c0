"""Perplexity: exp of the mean loss of the tokens that a model is asked for, over non-overlapping windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.api.journal import Journal
from compress.data.ids import corpus_sha256, model_ids
from compress.errors import NumericError
from compress.model.forward import total_loss
from compress.model.objective import NEXT_TOKENS, LMObjective, objective_of
from compress.model.open.load import load
from compress.model.open.opening import folder_of


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
    lm_objective: LMObjective = NEXT_TOKENS,
) -> Perplexity:
    """Mean loss of each token given those before it in its window; the first of each window has no loss.

    With another prediction (`prediction_of`): of the masked tokens given the others of their window, under masks that
    depend on the number of the window alone, so that they are the same for every model.
    progress(done, of) is called after every window.

    Raises NumericError when a loss is NaN, ModelError for next tokens of a model that predicts masked ones.
    """
    total, tokens, begin = 0.0, 0, perf_counter()
    for i, window in enumerate(ids):
        loss, count = total_loss(model, window, lm_objective, i)
        total += loss
        tokens += count
        if math.isnan(total):
            raise NumericError(f"the model's loss is NaN on window {i} of the evaluation text")
        if progress is not None:
            progress(i + 1, len(ids))
    return Perplexity(total / tokens, tokens, perf_counter() - begin, lm_objective.of)


def evaluate_texts(
    source: str, texts: Sequence[str], windows: int | None, length: int | None, dtype: str = "auto"
) -> dict[str, Perplexity]:
    """Perplexity by text for a checkpoint folder, a hub id or a .gguf file.

    Raises ModelError, CalibrationError; all texts are found before the first one is measured.
    """
    model, tokenizer = load(Path(folder_of(source)), dtype)
    lm_objective = objective_of(model, tokenizer)
    ids = {text: model_ids(model, tokenizer, text, "test", windows, length) for text in texts}
    return {text: perplexity(model, found, lm_objective=lm_objective) for text, found in ids.items()}


def perplexities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    texts: Mapping[str, Int[Tensor, "windows length"]],
    which: str,
    journal: Journal,
) -> dict[str, Perplexity]:
    """Perplexity by the name of each text; `which` model it is, for the journal."""
    found: dict[str, Perplexity] = {}
    for name, ids in texts.items():
        message = f"perplexity of the {which} model on {name}"

        def tell(done: int, of: int, message: str = message) -> None:
            journal.add("progress", "evaluate", message, done=done, of=of)

        found[name] = perplexity(model, ids, tell, objective_of(model, tokenizer))
    return found


def record(
    name: str, ids: Int[Tensor, "windows length"], base: Perplexity, compressed: Perplexity
) -> dict[str, Any]:  # fmt: skip
    """What the report says of a text."""
    facts = {"text": name, "windows": ids.shape[0], "length": ids.shape[1], "sha256": corpus_sha256(ids)}
    both = {"base": base, "compressed": compressed}
    return facts | {which: asdict(m) | {"perplexity": m.perplexity} for which, m in both.items()}
