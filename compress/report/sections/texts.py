"""Section: perplexity, loss and divergence on each text, with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.evaluate.divergence import AtPositions
from compress.evaluate.perplexity import Difference, Score, TextQuality
from compress.report.page.blocks import Bar, BarGroup, Bars, Block, Heading, Prose, Table
from compress.report.page.charts import Interval, Intervals
from compress.report.page.numbers import number, with_error
from compress.report.schema import Report
from compress.report.sections.base import Section
from compress.report.verdict import decided

HEAD = ("", "before", "after")
WIDTH = 1.96  # standard errors of half a 95% interval


class Texts(Section):
    """Of each text a table, its paired difference, and the divergence by position; report.md has them in one table."""

    title: ClassVar[str] = "Quality on text"
    order: ClassVar[int] = 12

    def render(self, report: Report) -> str | None:
        return None

    def blocks(self, report: Report) -> Sequence[Block]:
        texts: list[TextQuality] = report.evaluations.get("perplexity") or []
        paired = [interval(text, text.difference) for text in texts if text.difference is not None]
        found: list[Block] = []
        if paired:
            note = "Difference in loss, compressed minus base, in nats per token, with its 95% interval over windows."
            found += [Prose(note), Intervals(paired, "better", "worse")]
        for text in texts:
            found += [Heading(text.text)] if len(texts) > 1 else []
            found.append(Table(HEAD, rows(text)))
        groups = [by_position(text.text, text.divergence.by_position) for text in texts if text.divergence is not None]
        return [*found, Bars(groups)] if groups else found


def interval(text: TextQuality, change: Difference) -> Interval:
    """The loss difference on a text."""
    half = None if change.stderr is None else WIDTH * change.stderr
    low, high = (None, None) if half is None else (change.loss - half, change.loss + half)
    tone = "plain" if not decided(change) else "bad" if change.loss > 0 else "good"
    words = "" if change.stderr is None else ", significant" if decided(change) else ", not significant"
    shown = with_error(change.loss, change.stderr, "+") + words
    return Interval(text.text, change.loss, low, high, shown, f"{text.windows} windows of {text.length} tokens", tone)


def rows(text: TextQuality) -> list[tuple[str, ...]]:
    """Rows of `HEAD` on one text."""
    kind = "perplexity" if text.base.of == "next tokens" else f"perplexity of {text.base.of}"
    found: list[tuple[str, ...]] = [
        (kind, *(f"{score.perplexity:.3f}" for score in (text.base, text.compressed))),
        ("loss, nats per token", *(with_error(s.loss, s.stderr) for s in (text.base, text.compressed))),
    ]
    if text.base.bits_per_byte is not None and text.compressed.bits_per_byte is not None:
        found.append(("bits per byte", _bits(text.base), _bits(text.compressed)))
    if text.divergence is not None:
        other = text.divergence
        error = "" if other.agreement_stderr is None else f" ± {other.agreement_stderr:.1%}"
        found += [
            ("KL divergence, nats", "0", with_error(other.mean, other.stderr)),
            ("KL divergence, median and 99% quantile", "0", f"{number(other.median)} and {number(other.p99)}"),
            ("same most likely token", "100%", f"{other.agreement:.1%}{error}"),
        ]
    return found


def _bits(score: Score) -> str:
    assert score.bits_per_byte is not None
    return with_error(score.bits_per_byte, score.bits_stderr)


def by_position(name: str, found: Sequence[AtPositions]) -> BarGroup:
    """The KL divergence by the length of the context."""
    longest = max(row.kl for row in found) or 1.0
    bars = [Bar(_positions(row), max(row.kl, 0.0) / longest, number(row.kl)) for row in found]
    return BarGroup(f"KL divergence by position, {name}", "position of the token in its window", bars)


def _positions(row: AtPositions) -> str:
    return f"{row.first}" if row.first == row.last else f"{row.first} to {row.last}"
