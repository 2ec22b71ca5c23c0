"""The verdict in words: how much smaller a model is, and whether its loss is more than chance."""

from __future__ import annotations

from collections.abc import Sequence

from compress.evaluate.agreement import WORDS, TextAgreement
from compress.evaluate.perplexity import Difference
from compress.evaluate.speed import SpeedResult
from compress.report.page.numbers import with_error
from compress.report.schema import Report

DECIDED = 2  # standard errors from which a difference counts as decided
SIGNIFICANT = 0.05  # p-value below which the flips of a task count as more than chance


def of_loss(smaller: float, loss: float, stderr: float | None) -> str:
    """A size ratio and a paired loss difference in nats, in words."""
    size = f"{smaller:.2f}x smaller"
    if stderr is None:
        return f"{size}; loss {loss:+.4f} nats, of unknown error: measure more than one window"
    change = f"{loss:+.4f} ± {stderr:.4f}"
    worse = "worse" if loss > 0 else "better"
    chance = not decided(Difference(loss=loss, stderr=stderr))
    return f"{size}; loss {change} nats: " + ("no decided difference" if chance else f"{worse}, not by chance")


def decided(found: Difference) -> bool:
    """Whether a difference is more than chance."""
    return found.stderr is not None and abs(found.loss) > DECIDED * found.stderr


def faster(report: Report) -> float | None:
    """How many times faster the compressed model decodes one sequence; None if the speed was not measured."""
    found: SpeedResult | None = report.evaluations.get("speed")
    if found is None or len(found.models) < 2:
        return None
    first, *_, last = found.models.values()
    batch = min(first.decode)
    return last.decode[batch] / first.decode[batch]


def headline(report: Report) -> str:
    """The verdict in one sentence: size, speed if it was measured, and the loss on the first text."""
    smaller = report.size.dense_bytes / report.size.checkpoint_bytes
    parts = [f"{smaller:.2f} times smaller" if smaller >= 1 else f"{1 / smaller:.2f} times larger"]
    rate = faster(report)
    if rate is not None:
        parts.append(f"{rate:.2f} times faster" if rate >= 1 else f"{1 / rate:.2f} times slower")
    texts = [text for text in report.evaluations.get("perplexity") or [] if text.difference is not None]
    compared = agreements(report)
    if texts:
        parts.append(in_words(texts[0].difference))
    else:
        parts.append(in_sentences(compared[0])[0] if compared else "the quality was not measured")
    return ", ".join(parts) + "."


def in_words(found: Difference) -> str:
    """A loss difference in words: z ± e, and whether it is significant."""
    if found.stderr is None:
        return f"loss {with_error(found.loss, None, '+')} nats per token, of unknown error (one window)"
    if not decided(found):
        return f"no significant difference in loss ({with_error(found.loss, found.stderr, '+')} nats per token)"
    side = "worse" if found.loss > 0 else "better"
    return f"{side} by {with_error(abs(found.loss), found.stderr)} nats per token (significant)"


def of_report(report: Report) -> list[str]:
    """The verdict of a run: a sentence for size and loss, for the divergence, and for the tasks."""
    size = report.size
    smaller = size.dense_bytes / size.checkpoint_bytes
    texts = [text for text in report.evaluations.get("perplexity") or [] if text.difference is not None]
    if not texts and (compared := agreements(report)):
        return _of_agreement(f"{smaller:.2f}x smaller", compared) + of_tasks(report)
    if not texts:
        return [f"{smaller:.2f}x smaller; the quality was not measured (eval: null)"]
    found = [f"{of_loss(smaller, text.difference.loss, text.difference.stderr)} on {text.text}" for text in texts]
    found += [
        f"the most likely token is that of the base model at {text.divergence.agreement:.1%} of the positions of "
        f"{text.text}, KL divergence {text.divergence.mean:.4f} nats"
        for text in texts
        if text.divergence is not None
    ]
    rate = faster(report)
    if rate is not None:
        found.append(f"decodes {rate:.2f}x as fast as the base model (one sequence)")
    return found + of_tasks(report)


def agreements(report: Report) -> list[TextAgreement]:
    """The agreement with the base model on each text, of models without a language-model head."""
    return report.evaluations.get("agreement") or []


def in_sentences(text: TextAgreement) -> list[str]:
    """The measures on one text in words, the most important first."""
    return [WORDS[name].sentence.format(WORDS[name].shown(found)) for name, found in text.measures.items()]


def _of_agreement(size: str, compared: Sequence[TextAgreement]) -> list[str]:
    """A sentence for each text; the first begins with the size."""
    found = [f"{', '.join(in_sentences(text))} on {text.text}" for text in compared]
    return [f"{size}; {found[0]}", *found[1:]]


def of_tasks(report: Report) -> list[str]:
    """A sentence on the tasks, if there are any."""
    tasks = report.evaluations.get("tasks")
    rows = [row for row in tasks.scores if row.paired is not None and row.paired.p is not None] if tasks else []
    if not rows:
        return []
    other = [row for row in rows if row.paired.p < SIGNIFICANT]
    names = ", ".join(f"{row.task} {row.metric} ({row.paired.difference:+.3f})" for row in other)
    many = f"{len(other)} of {len(rows)} task metrics differ by more than chance (p < {SIGNIFICANT})"
    return [many + (f": {names}" if other else "")]
