"""Perplexity, bits per byte and divergence from the base model, with standard errors over windows of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.data.ids import corpus_sha256
from compress.evaluate.base import EvaluationContext, Evaluator, Record, SummaryRow
from compress.evaluate.divergence import Divergence, summarized
from compress.evaluate.store import Results, digest_of
from compress.evaluate.windows import Window, WindowTask, measure_windows
from compress.models.kinds.kinds import is_headless
from compress.models.kinds.objective import NEXT_TOKENS, LMObjective, objective_of
from compress.models.kinds.recordings import longest
from compress.numerics.statistics import mean, ratio

LARGEST = 700  # nats; exp overflows a float64 above 709


class Score(Record):
    """Loss and perplexity of one model on one text.

    loss: mean loss in nats over the targets of all windows. tokens: number of targets. seconds: wall time. of: the kind
    of the targets, 'next tokens' or 'masked tokens', whose perplexities cannot be compared. perplexity: exp(loss),
    infinity when that overflows. stderr: of the loss, with windows as the units of sampling. bits_per_byte: of the
    text in UTF-8, with its standard error; None for masked tokens and without a tokenizer. by_window: mean losses.
    """

    loss: float
    tokens: int
    seconds: float
    of: str
    perplexity: float
    stderr: float | None = None
    bits_per_byte: float | None = None
    bits_stderr: float | None = None
    by_window: list[float] = []


class Difference(Record):
    """The mean over windows of the difference of two models' losses, compressed minus base, and its standard error."""

    loss: float
    stderr: float | None


class TextQuality(Record):
    """The scores of both models on one text of [windows, length] token ids. sha256: of the ids.

    The length of recordings is that of the longest transcript.
    stride: see `WindowTask`. difference: paired by window. divergence: of the compressed model from the base.
    """

    text: str
    windows: int
    length: int
    sha256: str
    stride: int | None = None
    base: Score
    compressed: Score
    difference: Difference | None = None
    divergence: Divergence | None = None


def perplexity(
    model: nn.Module,
    ids: Int[Tensor, "windows length"],
    progress: Callable[[int, int], None] | None = None,
    lm_objective: LMObjective = NEXT_TOKENS,
    stride: int | None = None,
) -> Score:
    """Mean loss of each token given the tokens before it in its window; the first token of a window is no target.

    With another objective (`objective_of`): of the masked tokens given the other tokens of their window. The masks
    depend on the index of the window alone, so they are the same for every model.
    progress(done, of) is called after every window. stride: see `WindowTask`.

    Raises NumericError when a loss is NaN, ModelError for next tokens of a model that predicts masked tokens.
    """
    task = WindowTask(lm_objective, stride=stride)
    return score_of(measure_windows(model, ids, task, Results(None), progress), lm_objective.of)


def score_of(windows: Sequence[Window], of: str) -> Score:
    """The score from the results of all windows. of: the kind of the targets."""
    losses, tokens = [w["loss"] for w in windows], [w["tokens"] for w in windows]
    loss = ratio(losses, tokens)
    known = all(w["bytes"] for w in windows)
    bits = ratio([loss / math.log(2) for loss in losses], [w["bytes"] for w in windows]) if known else None
    return Score(
        loss=loss.value,
        tokens=sum(tokens),
        seconds=sum(w["seconds"] for w in windows),
        of=of,
        perplexity=exponential(loss.value),
        stderr=loss.stderr,
        bits_per_byte=None if bits is None else bits.value,
        bits_stderr=None if bits is None else bits.stderr,
        by_window=[loss / count for loss, count in zip(losses, tokens, strict=True)],
    )


def exponential(loss: float) -> float:
    """exp(loss), infinity when that overflows."""
    return math.exp(loss) if loss < LARGEST else math.inf


class Perplexity(Evaluator):
    """Loss of both models on every evaluation text, and the divergence of the compressed model from the base.

    A model without a language-model head has none; `agreement` measures it.
    """

    needs_base: ClassVar[bool] = True
    result_type: ClassVar[Any] = list[TextQuality]

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any]:
        """By text: windows, length and sha256 of its ids, the score, and the divergence from the base.

        Raises NumericError, ModelError.
        """
        found: dict[str, Any] = {}
        if not context.texts or is_headless(model):
            return found
        settings, lm_objective = context.settings, objective_of(model, context.tokenizer)
        for name, ids in context.texts.items():
            facts = {
                "windows": ids.shape[0],
                "length": longest(ids),
                "sha256": corpus_sha256(ids),
                "stride": settings.stride,
            }
            text = digest_of(facts)[:16]
            kept = None if settings.top_k is None else context.store.base_folder(f"text {text}, top {settings.top_k}")
            task = WindowTask(lm_objective, context.tokenizer, settings.stride, settings.top_k, kept, context.which)
            tell = context.telling(f"perplexity of {context.model} on {name}")
            windows = measure_windows(model, ids, task, context.store.results(f"text {text}"), tell)
            divergence = None
            if task.top_k is not None and all("kl" in window for window in windows):
                divergence = summarized(
                    [(w["kl"], w["same"], w["positions"]) for w in windows], task.top_k
                ).model_dump()
            found[name] = {
                **facts,
                "score": score_of(windows, lm_objective.of).model_dump(),
                "divergence": divergence,
            }
        return found

    def combine(self, compressed: dict[str, Any] | None, base: dict[str, Any] | None) -> list[dict[str, Any]]:
        """One `TextQuality` per text, as JSON."""
        assert compressed is not None and base is not None
        return [
            {"text": name}
            | {key: value for key, value in found.items() if key != "score"}
            | {"base": base[name]["score"], "compressed": found["score"]}
            | {"difference": difference(base[name]["score"], found["score"]).model_dump()}
            for name, found in compressed.items()
        ]

    def summary(self, result: Sequence[TextQuality]) -> list[SummaryRow]:
        rows = []
        for text in result:
            before, after, of = text.base.perplexity, text.compressed.perplexity, text.base.of
            kind = "perplexity" if of == NEXT_TOKENS.of else f"perplexity of {of}"
            name = f"{kind}, {text.text} ({text.windows} x {text.length} tokens)"
            rows.append((name, f"{before:.2f}", f"{after:.2f}", f"{after / before:.3f}x"))
            if text.difference is not None:
                error = "" if text.difference.stderr is None else f" ± {text.difference.stderr:.4f}"
                change = f"{text.difference.loss:+.4f}{error}"
                rows.append((f"loss, {text.text}", f"{text.base.loss:.4f}", f"{text.compressed.loss:.4f}", change))
            if text.divergence is not None:
                kl, error = text.divergence.mean, text.divergence.stderr
                shown = f"{kl:.4f}" + ("" if error is None else f" ± {error:.4f}")
                rows.append((f"KL from the base, {text.text}", "0", shown, f"{text.divergence.agreement:.1%} equal"))
        return rows


def difference(base: dict[str, Any], compressed: dict[str, Any]) -> Difference:
    """The paired difference of two scores on the same windows."""
    pairs = zip(base["by_window"], compressed["by_window"], strict=True)
    found = mean([after - before for before, after in pairs])
    return Difference(loss=found.value, stderr=found.stderr)
