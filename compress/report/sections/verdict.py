"""Section: the verdict in words, above everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.evaluate.agreement import WORDS, Measure
from compress.evaluate.divergence import Divergence
from compress.evaluate.perplexity import TextQuality
from compress.evaluate.speed import SpeedResult
from compress.report.page.blocks import Block, Items, Lead, Tile, Tiles
from compress.report.page.numbers import PLUS_MINUS, data_size, number, signed, upper_first, with_error
from compress.report.schema import Report
from compress.report.sections.base import Section
from compress.report.verdict import agreements, decided, faster, headline, in_sentences, in_words, of_report, of_tasks


class Verdict(Section):
    """A list with the sentences of `of_report`."""

    title: ClassVar[str] = "Verdict"
    order: ClassVar[int] = 5

    def render(self, report: Report) -> str:
        return "\n".join(f"- {sentence}" for sentence in of_report(report))

    def blocks(self, report: Report) -> Sequence[Block]:
        texts: list[TextQuality] = report.evaluations.get("perplexity") or []
        tiles = [_size(report), *_speed(report)]
        if texts:
            tiles.append(_loss(texts[0]))
            tiles += [] if texts[0].divergence is None else [_agreement(texts[0].text, texts[0].divergence)]
        compared = agreements(report)
        for text in compared[:1]:
            tiles += [_measure(text.text, name, found) for name, found in text.measures.items()][:2]
        others = [f"On {t.text}: {in_words(t.difference)}." for t in texts[1:] if t.difference is not None]
        others += [f"On {text.text}: {', '.join(in_sentences(text))}." for text in compared[1:]]
        others += [f"{upper_first(sentence)}." for sentence in of_tasks(report)]
        return [Lead(headline(report)), Tiles(tiles), *([Items(others)] if others else [])]


def _size(report: Report) -> Tile:
    size = report.size
    note = f"{data_size(size.dense_bytes)} → {data_size(size.checkpoint_bytes)}"
    smaller = size.dense_bytes / size.checkpoint_bytes
    return Tile(f"{smaller:.2f}×", "smaller", note, "good" if smaller > 1 else "plain")


def _speed(report: Report) -> list[Tile]:
    """The speed of decoding, if it was measured."""
    rate, found = faster(report), report.evaluations.get("speed")
    if rate is None or not isinstance(found, SpeedResult):
        return []
    first, *_, last = found.models.values()
    batch = min(first.decode)
    note = f"{first.decode[batch]:.1f} → {last.decode[batch]:.1f} tokens/s, one sequence"
    return [Tile(f"{rate:.2f}×", "decoding speed", note, "good" if rate > 1 else "bad")]


def _loss(text: TextQuality) -> Tile:
    change = text.difference
    if change is None:
        note = f"perplexity {text.base.perplexity:.2f} → {text.compressed.perplexity:.2f}"
        difference = signed(f"{text.compressed.loss - text.base.loss:+.4f}")
        return Tile(difference, f"loss in nats per token, {text.text}", note)
    value, _, error = with_error(change.loss, change.stderr, "+").partition(PLUS_MINUS)
    note = f"± {error}, {'' if decided(change) else 'not '}significant" if error else "of unknown error"
    tone = "plain" if not decided(change) else "bad" if change.loss > 0 else "good"
    return Tile(value, f"loss in nats per token, {text.text}", note, tone)


def _measure(text: str, name: str, found: Measure) -> Tile:
    """A measure of agreement with the base model."""
    value, _, error = WORDS[name].shown(found).partition(" ± ")
    return Tile(value, WORDS[name].name, f"± {error}, {text}" if error else text)


def _agreement(name: str, found: Divergence) -> Tile:
    return Tile(
        f"{found.agreement:.1%}", "same most likely token as before", f"KL divergence {number(found.mean)} nats, {name}"
    )
