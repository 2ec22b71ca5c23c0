"""The verdict in words: how much smaller a model is, and whether its loss is more than chance."""

from __future__ import annotations

from collections.abc import Sequence

from compress.evaluate.agreement import MEASURE_WORDS, TextAgreement
from compress.evaluate.perplexity import Difference
from compress.evaluate.result import Measurements, RunResult
from compress.evaluate.speed import SpeedResult
from compress.report.page.numbers import with_error

DECIDED = 2  # standard errors from which a difference counts as decided
SIGNIFICANT = 0.05  # p-value below which the flips of a task count as more than chance


def of_loss(smaller: float, loss: float, stderr: float | None) -> str:
    """Describe a size ratio and a paired loss difference.

    Args:
        smaller: Size of the base model relative to the variant.
        loss: Loss difference in nats per token.
        stderr: Its standard error; None if it is unknown.
    """
    size = f"{smaller:.2f}x smaller"
    if stderr is None:
        return f"{size}; loss {loss:+.4f} nats, of unknown error: measure more than one window"
    change = f"{loss:+.4f} ± {stderr:.4f}"
    worse = "worse" if loss > 0 else "better"
    chance = not decided(Difference(loss=loss, stderr=stderr))
    return f"{size}; loss {change} nats: " + ("no decided difference" if chance else f"{worse}, not by chance")


def decided(difference: Difference) -> bool:
    """Return whether a difference is more than chance."""
    return difference.stderr is not None and abs(difference.loss) > DECIDED * difference.stderr


def faster(measured: Measurements) -> float | None:
    """Return the ratio of the decoding speeds of one sequence; None if the speed was not measured."""
    speed: SpeedResult | None = measured.evaluations.get("speed")
    if speed is None or len(speed.models) < 2:
        return None
    base, *_, compressed = speed.models.values()
    batch = min(base.decode)
    return compressed.decode[batch] / base.decode[batch]


def headline(result: RunResult) -> str:
    """Return the verdict in one sentence: size, speed if it was measured, and the loss on the first text."""
    smaller = result.size.dense_bytes / result.size.checkpoint_bytes
    parts = [f"{smaller:.2f} times smaller" if smaller >= 1 else f"{1 / smaller:.2f} times larger"]
    rate = faster(result)
    if rate is not None:
        parts.append(f"{rate:.2f} times faster" if rate >= 1 else f"{1 / rate:.2f} times slower")
    differences = [text.difference for text in result.texts if text.difference is not None]
    if differences:
        parts.append(in_words(differences[0]))
    elif result.agreements:
        parts.append(in_sentences(result.agreements[0])[0])
    else:
        parts.append("the quality was not measured")
    return ", ".join(parts) + "."


def in_words(difference: Difference) -> str:
    """Describe a loss difference: its value with its error, and whether it is significant."""
    if difference.stderr is None:
        return f"loss {with_error(difference.loss, None, '+')} nats per token, of unknown error (one window)"
    if not decided(difference):
        change = with_error(difference.loss, difference.stderr, "+")
        return f"no significant difference in loss ({change} nats per token)"
    side = "worse" if difference.loss > 0 else "better"
    return f"{side} by {with_error(abs(difference.loss), difference.stderr)} nats per token (significant)"


def of_result(result: RunResult) -> list[str]:
    """Return the verdict on a run: sentences for size and loss, for the divergence, and for the tasks."""
    size = f"{result.size.dense_bytes / result.size.checkpoint_bytes:.2f}x smaller"
    smaller = result.size.dense_bytes / result.size.checkpoint_bytes
    compared = [(text, text.difference) for text in result.texts if text.difference is not None]
    if not compared and result.agreements:
        return _of_agreement(size, result.agreements) + of_tasks(result)
    if not compared:
        return [f"{size}; the quality was not measured (eval: null)"]
    sentences = [f"{of_loss(smaller, change.loss, change.stderr)} on {text.text}" for text, change in compared]
    sentences += [
        f"the most likely token is that of the base model at {text.divergence.agreement:.1%} of the positions of "
        f"{text.text}, KL divergence {text.divergence.mean:.4f} nats"
        for text, _ in compared
        if text.divergence is not None
    ]
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
    tasks = measured.evaluations.get("tasks")
    rows = [row for row in tasks.scores if row.paired is not None and row.paired.p is not None] if tasks else []
    if not rows:
        return []
    significant = [row for row in rows if row.paired.p < SIGNIFICANT]
    names = ", ".join(f"{row.task} {row.metric} ({row.paired.difference:+.3f})" for row in significant)
    many = f"{len(significant)} of {len(rows)} task metrics differ by more than chance (p < {SIGNIFICANT})"
    return [many + (f": {names}" if significant else "")]
