"""Perplexity: exp of the mean loss per target token, over non-overlapping windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.api.context import Run
from compress.data.ids import corpus_sha256, model_sample
from compress.errors import NumericError
from compress.evaluate.base import EvaluationContext, Evaluator, Record, SummaryRow
from compress.model.forward import total_loss
from compress.model.objective import NEXT_TOKENS, LMObjective, objective_of
from compress.model.open.load import load
from compress.model.open.opening import InMemory, OpenModel, folder_of
from compress.model.open.supported import check_language_model
from compress.model.structure.blocks import find_blocks
from compress.stream.capture import ModelShell

LARGEST = 700  # nats; exp overflows a float64 above 709


class Score(Record):
    """Loss and perplexity of one model on one text.

    loss: mean loss in nats over the targets of all windows. tokens: number of targets. seconds: wall time. of: the kind
    of the targets, 'next tokens' or 'masked tokens', whose perplexities cannot be compared. perplexity: exp(loss),
    infinity when that overflows.
    """

    loss: float
    tokens: int
    seconds: float
    of: str
    perplexity: float


class TextQuality(Record):
    """The scores of both models on one text of [windows, length] token ids. sha256: of the ids."""

    text: str
    windows: int
    length: int
    sha256: str
    base: Score
    compressed: Score


def perplexity(
    model: nn.Module,
    ids: Int[Tensor, "windows length"],
    progress: Callable[[int, int], None] | None = None,
    lm_objective: LMObjective = NEXT_TOKENS,
) -> Score:
    """Mean loss of each token given the tokens before it in its window; the first token of a window is no target.

    With another objective (`objective_of`): of the masked tokens given the other tokens of their window. The masks
    depend on the index of the window alone, so they are the same for every model.
    progress(done, of) is called after every window.

    Raises NumericError when a loss is NaN, ModelError for next tokens of a model that predicts masked tokens.
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
    loss, seconds = total / tokens, perf_counter() - begin
    return Score(loss=loss, tokens=tokens, seconds=seconds, of=lm_objective.of, perplexity=exponential(loss))


def exponential(loss: float) -> float:
    """exp(loss), infinity when that overflows."""
    return math.exp(loss) if loss < LARGEST else math.inf


class Perplexity(Evaluator):
    """Perplexity of both models on every evaluation text."""

    needs_base: ClassVar[bool] = True
    result_type: ClassVar[Any] = list[TextQuality]

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any]:
        """By text: windows, length and sha256 of its ids, and the score.

        Raises NumericError, ModelError.
        """
        found: dict[str, Any] = {}
        for name, ids in context.texts.items():
            message = f"perplexity of the {context.which} model on {name}"

            def tell(done: int, of: int, message: str = message) -> None:
                context.run.journal.add("progress", "evaluate", message, done=done, of=of)

            facts = {"windows": ids.shape[0], "length": ids.shape[1], "sha256": corpus_sha256(ids)}
            score = perplexity(model, ids, tell, objective_of(model, context.tokenizer))
            found[name] = {**facts, "score": score.model_dump()}
        return found

    def combine(self, compressed: dict[str, Any] | None, base: dict[str, Any] | None) -> list[dict[str, Any]]:
        """One `TextQuality` per text, as JSON."""
        assert compressed is not None and base is not None
        return [
            {"text": name}
            | {key: value for key, value in found.items() if key != "score"}
            | {"base": base[name]["score"], "compressed": found["score"]}
            for name, found in compressed.items()
        ]

    def summary(self, result: Sequence[TextQuality]) -> list[SummaryRow]:
        rows = []
        for text in result:
            before, after, of = text.base.perplexity, text.compressed.perplexity, text.base.of
            kind = "perplexity" if of == NEXT_TOKENS.of else f"perplexity of {of}"
            name = f"{kind}, {text.text} ({text.windows} x {text.length} tokens)"
            rows.append((name, f"{before:.2f}", f"{after:.2f}", f"{after / before:.3f}x"))
        return rows


def evaluate_texts(
    source: str, texts: Sequence[str], windows: int | None, length: int | None, dtype: str = "auto"
) -> Mapping[str, Score]:
    """The score by text of a checkpoint folder, a hub id or a .gguf file.

    Raises ModelError, CalibrationError; all texts are read before the first one is measured.
    """
    model, tokenizer = load(Path(folder_of(source)), dtype)
    check_language_model(model)
    first = next(model.parameters())
    opened = OpenModel(model, find_blocks(model), InMemory(), tokenizer, source, "", first.device, first.dtype)
    ModelShell(opened).check()
    objective_of(model, tokenizer)  # an unknown mask token is an error before texts are read
    ids = {text: model_sample(model, tokenizer, text, "test", windows, length)[0] for text in texts}
    found = Perplexity().measure(model, EvaluationContext(Run(), texts=ids, tokenizer=tokenizer))
    return {text: Score.model_validate(values["score"]) for text, values in found.items()}
