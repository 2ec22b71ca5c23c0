"""Section: the verdict in words, above everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.names import escaped
from compress.report.page.blocks import Items, KeyFigure, KeyFigures, Lead, PageBlock
from compress.report.page.numbers import PLUS_MINUS, data_size, number, signed, upper_first, with_error
from compress.report.sections.base import Section
from compress.report.verdict import (
    compared_verdict,
    faster,
    headline,
    in_sentences,
    in_words,
    of_result,
    of_tasks,
    storage_bits,
)
from compress.results.measurements.agreement import MEASURE_WORDS, Measure
from compress.results.measurements.perplexity import Divergence, TextQuality
from compress.results.measurements.speed import SpeedResult
from compress.results.result import RunResult


class VerdictSection(Section):
    """A list with the sentences of `of_result`; on the page, the main figures."""

    title: ClassVar[str] = "Verdict"
    order: ClassVar[int] = 5

    def render(self, result: RunResult) -> str:
        return "\n".join(f"- {escaped(sentence)}" for sentence in of_result(result))

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        figures = [_size(result), *_speed(result)]
        for text in result.texts[:1]:
            figures.append(_loss(text))
            figures += [] if text.divergence is None else [_divergence(text.text, text.divergence)]
        for text in result.agreements[:1]:
            figures += [_measure(text.text, name, measure) for name, measure in text.measures.items()][:2]
        sentences = [f"On {t.text}: {in_words(t)}." for t in result.texts[1:] if t.difference is not None]
        sentences += [f"On {text.text}: {', '.join(in_sentences(text))}." for text in result.agreements[1:]]
        sentences += [f"{upper_first(sentence)}." for sentence in of_tasks(result)]
        return [Lead(headline(result)), KeyFigures(figures), *([Items(sentences)] if sentences else [])]


def _size(result: RunResult) -> KeyFigure:
    size = result.size
    note = f"{data_size(size.dense_bytes)} → {data_size(size.checkpoint_bytes)}"
    label = "smaller"
    if size.other_source_bytes is not None:
        note += f"; the source file has {data_size(size.other_source_bytes)}"
        label = f"smaller than in {storage_bits(result)} bits"
    smaller = size.dense_bytes / size.checkpoint_bytes
    return KeyFigure(f"{smaller:.2f}×", label, note, "good" if smaller > 1 else "plain")


def _speed(result: RunResult) -> list[KeyFigure]:
    """The speed of decoding, if it was measured."""
    rate, speed = faster(result), result.evaluations.get("speed")
    if rate is None or not isinstance(speed, SpeedResult):
        return []
    base, *_, compressed = speed.models.values()
    batch = min(base.decode)
    note = f"{base.decode[batch]:.1f} → {compressed.decode[batch]:.1f} tokens/s, one sequence"
    return [KeyFigure(f"{rate:.2f}×", "decoding speed", note, "good" if rate > 1 else "bad")]


def _loss(text: TextQuality) -> KeyFigure:
    change = text.difference
    if change is None:
        perplexities = [f"{score.perplexity:.2f}" for score in (text.base, text.compressed) if score is not None]
        note = f"perplexity {' → '.join(perplexities)}"
        if text.base is None:
            return KeyFigure(signed(f"{text.compressed.loss:.4f}"), f"loss in nats per token, {text.text}", note)
        difference = signed(f"{text.compressed.loss - text.base.loss:+.4f}")
        return KeyFigure(difference, f"loss in nats per token, {text.text}", note)
    value, _, error = with_error(change.loss, change.stderr, "+").partition(PLUS_MINUS)
    verdict = compared_verdict(text)
    note = f"± {error}, {verdict.outcome}" if error else f"of unknown error, {verdict.outcome}"
    return KeyFigure(value, f"loss in nats per token, {text.text}", note, verdict.tone)


def _measure(text: str, name: str, measure: Measure) -> KeyFigure:
    """A measure of agreement with the base model."""
    words = MEASURE_WORDS[name]
    value, _, error = words.value_text(measure).partition(" ± ")
    return KeyFigure(value, words.name, f"± {error}, {text}" if error else text)


def _divergence(name: str, divergence: Divergence) -> KeyFigure:
    note = f"KL divergence {number(divergence.mean)} nats, {name}"
    return KeyFigure(f"{divergence.agreement:.1%}", "same most likely token as before", note)
