"""The verdict in words: how much smaller a model is, and what the measurements of its quality show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compress.numerics.dtype_names import DTYPE_BITS
from compress.report.page.numbers import with_error
from compress.results.measurements.agreement import MEASURE_WORDS, TextAgreement
from compress.results.measurements.base import overlap_in_words
from compress.results.measurements.perplexity import Difference, TextQuality
from compress.results.measurements.speed import SpeedResult
from compress.results.measurements.tasks import TasksResult, adjusted_p_values
from compress.results.result import Measurements, RunResult
from compress.results.verdict import OUTCOMES, Verdict, verdict_of

SIGNIFICANT = 0.05
"""p-value, adjusted for the number of metrics, below which the flips of a task count as a difference."""


def of_loss(text: TextQuality, change: Difference) -> str:
    """Describe the loss difference on a text and the verdict, as 'loss +0.0402 ± 0.0031 nats per token: worse'."""
    error = "of unknown error" if change.stderr is None else f"± {change.stderr:.4f}"
    loss = f"loss {change.loss:+.4f} {error} nats per token"
    return f"{loss}: {outcome_with_reason(compared_verdict(text))}"


def outcome_with_reason(verdict: Verdict) -> str:
    """Return the outcome and, if there is one, its reason in brackets."""
    return f"{verdict.outcome} ({verdict.reason})" if verdict.reason else verdict.outcome


def overlap_warnings(measured: Measurements) -> list[str]:
    """Return a warning for each text of which the calibration of the model has read tokens."""
    texts = [(text.text, text.overlap) for text in (*measured.texts, *measured.agreements)]
    return [f"Warning: {overlap_in_words(name, overlap)}" for name, overlap in texts if overlap]


def faster(measured: Measurements) -> float | None:
    """Return the ratio of the decoding speeds of one sequence; None if the speed was not measured."""
    speed: SpeedResult | None = measured.evaluations.get("speed")
    if speed is None or len(speed.models) < 2:
        return None
    base, *_, compressed = speed.models.values()
    batch = min(base.decode)
    return compressed.decode[batch] / base.decode[batch]


def storage_bits(result: RunResult) -> int:
    """Return the bits of a stored weight before compression."""
    return DTYPE_BITS[result.reproduce.storage_dtype]


def size_in_words(result: RunResult, ratio_words: Callable[[float], str]) -> str:
    """Describe the size of a checkpoint against the dense model and, if its size differs, against the source files.

    Args:
        ratio_words: words for a ratio of sizes, such as '2.00 times smaller'.
    """
    size = result.size
    dense = ratio_words(size.dense_bytes / size.checkpoint_bytes)
    if size.other_source_bytes is None:
        return dense
    source = ratio_words(size.other_source_bytes / size.checkpoint_bytes)
    return f"{source} than the source file, {dense} than in {storage_bits(result)} bits"


def times_smaller(ratio: float) -> str:
    """Return a ratio of sizes in words, such as '2.00 times smaller'."""
    return f"{ratio:.2f} times smaller" if ratio >= 1 else f"{1 / ratio:.2f} times larger"


def x_smaller(ratio: float) -> str:
    """Return a ratio of sizes in short, such as '2.00x smaller'."""
    return f"{ratio:.2f}x smaller" if ratio >= 1 else f"{1 / ratio:.2f}x larger"


def headline(result: RunResult) -> str:
    """Return the verdict in one sentence: size, speed if it was measured, and the most severe outcome of the texts."""
    parts = [size_in_words(result, times_smaller)]
    rate = faster(result)
    if rate is not None:
        parts.append(f"{rate:.2f} times faster" if rate >= 1 else f"{1 / rate:.2f} times slower")
    texts = [text for text in result.texts if text.difference is not None]
    if texts:
        worst = max(texts, key=lambda text: OUTCOMES.index(compared_verdict(text).outcome))
        parts.append(in_words(worst) + (f" on {worst.text}" if len(texts) > 1 else ""))
    elif result.agreements:
        parts.append(in_sentences(result.agreements[0])[0])
    else:
        parts.append("the quality was not measured")
    return " ".join([", ".join(parts) + ".", *(f"{text}." for text in overlap_warnings(result))])


def compared_verdict(text: TextQuality) -> Verdict:
    """Return the verdict on a text on which the model was compared with its base."""
    verdict = verdict_of(text)
    assert verdict is not None, f"{text.text} has no base"
    return verdict


def in_words(text: TextQuality) -> str:
    """Describe the verdict on a text, with the loss difference and its standard error."""
    verdict, change = compared_verdict(text), text.difference
    assert change is not None
    if verdict.outcome in ("worse", "better"):
        return f"{verdict.outcome} by {with_error(abs(change.loss), change.stderr)} nats per token"
    loss = f"loss {with_error(change.loss, change.stderr, '+')} nats per token"
    return f"{outcome_with_reason(verdict)}, {loss}"


def of_result(result: RunResult) -> list[str]:
    """Return the verdict on a run: sentences for size and loss, for the divergence, and for the tasks."""
    size = size_in_words(result, x_smaller)
    compared = [(text, text.difference) for text in result.texts if text.difference is not None]
    warnings = overlap_warnings(result)
    if not compared and result.agreements:
        return _of_agreement(size, result.agreements) + warnings + of_tasks(result)
    if not compared:
        return [f"{size}; the quality was not measured (eval: null)"]
    sentences = [f"{size}; {of_loss(text, change)}, on {text.text}" for text, change in compared]
    sentences += [
        f"the most likely token is that of the base model at {text.divergence.agreement:.1%} of the positions of "
        f"{text.text}, KL divergence {text.divergence.mean:.4f} nats"
        for text, _ in compared
        if text.divergence is not None
    ]
    sentences += warnings
    rate = faster(result)
    if rate is not None:
        sentences.append(f"decodes {rate:.2f}x as fast as the base model (one sequence)")
    return sentences + of_tasks(result)


def in_sentences(text: TextAgreement) -> list[str]:
    """Describe the measures on one text, the most important first."""
    return [
        MEASURE_WORDS[name].sentence.format(MEASURE_WORDS[name].value_text(measure))
        for name, measure in text.measures.items()
    ]


def _of_agreement(size: str, texts: Sequence[TextAgreement]) -> list[str]:
    """A sentence for each text; the first begins with the size."""
    sentences = [f"{', '.join(in_sentences(text))} on {text.text}" for text in texts]
    return [f"{size}; {sentences[0]}", *sentences[1:]]


def of_tasks(measured: Measurements) -> list[str]:
    """Return a sentence on the tasks, if there are any."""
    tasks: TasksResult | None = measured.evaluations.get("tasks")
    p_values = {} if tasks is None else adjusted_p_values(tasks.scores)
    if tasks is None or not p_values:
        return []
    differing = [row for row in tasks.scores if p_values.get((row.task, row.metric), 1.0) < SIGNIFICANT]
    names = ", ".join(f"{row.task} {row.metric} ({row.compressed - row.base:+.3f})" for row in differing)
    test = f"McNemar's test with Holm's correction, p < {SIGNIFICANT}"
    return [f"{len(differing)} of {len(p_values)} task metrics differ ({test})" + (f": {names}" if differing else "")]
