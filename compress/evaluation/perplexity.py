"""Perplexity, bits per byte and divergence from the base model, with standard errors over windows of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.evaluation.base import EvaluationContext, Evaluator
from compress.evaluation.chunks import check_chunk, prove_chunks
from compress.evaluation.divergence import summarized
from compress.evaluation.store import Results, digest_of
from compress.evaluation.windows import Window, WindowTask, measure_windows
from compress.models.forward import device_of_model
from compress.models.kinds.batch import Examples
from compress.models.kinds.causal import CAUSAL
from compress.models.kinds.contract import ModelKind
from compress.models.kinds.kinds import is_headless, objective_of
from compress.numerics.statistics import mean, ratio
from compress.results.measurements.perplexity import Difference, Score

LARGEST = 700  # nats; exp overflows a float64 above 709


def perplexity(
    model: nn.Module,
    text: Int[Tensor, "windows length"] | Examples,
    progress: Callable[[int, int], None] | None = None,
    lm_objective: ModelKind = CAUSAL,
    stride: int | None = None,
) -> Score:
    """Measure the mean loss of each token given the tokens before it in its window.

    The first token of a window is no target. With another objective (`objective_of`), the targets are the masked tokens
    given the other tokens of their window. The masks depend on the index of the window alone, so they are the same for
    every model.

    Args:
        model: Model to measure.
        text: Token ids, or examples.
        progress: Is called with (number of measured windows, number of windows) after every window.
        lm_objective: What the model predicts.
        stride: See `WindowTask`.

    Raises:
        NumericError: if a loss is NaN.
        ModelError: for next tokens of a model that predicts masked tokens.
    """
    task = WindowTask(lm_objective, stride=stride)
    windows = text if isinstance(text, Examples) else Examples.of_ids(text)
    return score_of(measure_windows(model, windows, task, Results(None), progress), lm_objective.predicts)


def score_of(windows: Sequence[Window], of: str) -> Score:
    """Combine the results of all windows into a score; `of` is the kind of the targets."""
    losses, tokens = [w["loss"] for w in windows], [w["tokens"] for w in windows]
    loss = ratio(losses, tokens)
    has_bytes = all(w["bytes"] for w in windows)
    bits = ratio([loss / math.log(2) for loss in losses], [w["bytes"] for w in windows]) if has_bytes else None
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
    """Compute exp(loss); infinity if that overflows."""
    return math.exp(loss) if loss < LARGEST else math.inf


class Perplexity(Evaluator):
    """Loss of both models on every evaluation text, and the divergence of the compressed model from the base.

    A model without a language-model head has none; `agreement` measures it.
    """

    needs_base: ClassVar[bool] = True

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any]:
        """Measure the score of each text and the divergence from the base, with windows, length and sha256 of its ids.

        Raises:
            NumericError: if a loss is NaN.
            ModelError: if the model does not predict what the objective asks for.
            CalibrationError: as `check_chunk` and `prove_chunks`.
        """
        measured: dict[str, Any] = {}
        if not context.texts or is_headless(model):
            return measured
        settings, lm_objective = context.settings, objective_of(model, context.tokenizer)
        chunk = settings.chunk
        if chunk is not None:
            check_chunk(model, chunk)
            prove_chunks(model, next(iter(context.texts.values()))[0].to(device_of_model(model)), chunk)
        for name, examples in context.texts.items():
            facts = {
                "windows": len(examples),
                "length": examples.length,
                "sha256": examples.sha256(),
                "stride": settings.stride,
            }
            text, stored = digest_of(facts)[:16], f", chunks of {chunk}" if chunk is not None else ""
            base_folder = None
            if settings.top_k is not None:
                base_folder = context.store.base_folder(f"text {text}{stored}, top {settings.top_k}")
            task = WindowTask(
                lm_objective, context.tokenizer, settings.stride, settings.top_k, base_folder, context.role, chunk
            )
            tell = context.progress(f"perplexity of {context.model} on {name}")
            windows = measure_windows(model, examples, task, context.store.results(f"text {text}"), tell)
            divergence = None
            if task.top_k is not None and all("kl" in window for window in windows):
                divergence = summarized(
                    [(w["kl"], w["same"], w["positions"]) for w in windows], task.top_k
                ).model_dump()
            measured[name] = {
                **facts,
                "chunk": chunk,
                "score": score_of(windows, lm_objective.predicts).model_dump(),
                "divergence": divergence,
                "overlap": context.overlaps.get(name),
            }
        return measured

    def combine(self, compressed: dict[str, Any] | None, base: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Return one `TextQuality` per text, as JSON."""
        assert compressed is not None
        texts = []
        for name, measured in compressed.items():
            text = {"text": name} | {key: value for key, value in measured.items() if key != "score"}
            if base is not None:
                text["base"] = base[name]["score"]
                text["difference"] = difference(base[name]["score"], measured["score"]).model_dump()
            texts.append(text | {"compressed": measured["score"]})
        return texts


def difference(base: dict[str, Any], compressed: dict[str, Any]) -> Difference:
    """Compute the paired difference of two scores on the same windows."""
    pairs = zip(base["by_window"], compressed["by_window"], strict=True)
    change = mean([compressed_loss - base_loss for base_loss, compressed_loss in pairs])
    return Difference(loss=change.value, stderr=change.stderr)
