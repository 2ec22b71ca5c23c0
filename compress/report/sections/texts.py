"""Section: perplexity, loss and divergence on each text, with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.charts import Interval, IntervalChart
from compress.report.page.blocks import Bar, BarGroup, Bars, Heading, PageBlock, Prose, TextTable
from compress.report.page.numbers import number, with_error
from compress.report.sections.base import Section
from compress.report.verdict import compared_verdict
from compress.results.measurements.perplexity import AtPositions, Difference, Score, TextQuality
from compress.results.result import RunResult
from compress.results.verdict import interval as confidence_interval

HEAD = ("", "before", "after")


class TextsSection(Section):
    """Of each text a table, its paired difference, and the divergence by position; report.md has them in one table."""

    title: ClassVar[str] = "Quality on text"
    order: ClassVar[int] = 12

    def render(self, result: RunResult) -> str | None:
        return None

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        paired = [interval(text, text.difference) for text in result.texts if text.difference is not None]
        blocks: list[PageBlock] = []
        if paired:
            note = "Difference in loss, compressed minus base, with its 95% interval over windows (Student's t)."
            chart = IntervalChart("Change of the loss", paired, "loss difference, nats per token", "better", "worse")
            blocks += [Prose(note), chart]
        for text in result.texts:
            blocks += [Heading(text.text)] if len(result.texts) > 1 else []
            blocks.append(TextTable(HEAD, rows(text)))
        groups = [
            by_position(text.text, text.divergence.by_position) for text in result.texts if text.divergence is not None
        ]
        return [*blocks, Bars(groups)] if groups else blocks


def interval(text: TextQuality, change: Difference) -> Interval:
    """Return the loss difference on a text."""
    bounds = confidence_interval(change.loss, change.stderr, text.windows)
    low, high = (None, None) if bounds is None else bounds
    verdict = compared_verdict(text)
    figures = f"{with_error(change.loss, change.stderr, '+')}, {verdict.outcome}"
    windows = f"{text.windows} windows of {text.length} tokens" + (f", {text.chunk} at a time" if text.chunk else "")
    return Interval(text.text, change.loss, low, high, figures, windows, verdict.tone)


def rows(text: TextQuality) -> list[tuple[str, ...]]:
    """List rows of `HEAD` on one text; without a base model its column is empty."""
    scores = text.base, text.compressed
    of = text.compressed.of
    kind = "perplexity" if of == "next tokens" else f"perplexity of {of}"
    table: list[tuple[str, ...]] = [
        (kind, *("" if score is None else f"{score.perplexity:.3f}" for score in scores)),
        ("loss, nats per token", *("" if score is None else with_error(score.loss, score.stderr) for score in scores)),
    ]
    if text.compressed.bits_per_byte is not None:
        table.append(("bits per byte", *map(_bits, scores)))
    divergence = text.divergence
    if divergence is not None:
        error = "" if divergence.agreement_stderr is None else f" ± {divergence.agreement_stderr:.1%}"
        quantiles = f"{number(divergence.median)} and {number(divergence.p99)}"
        table += [
            ("KL divergence, nats", "0", with_error(divergence.mean, divergence.stderr)),
            ("KL divergence, median and 99% quantile", "0", quantiles),
            ("same most likely token", "100%", f"{divergence.agreement:.1%}{error}"),
        ]
    return table


def _bits(score: Score | None) -> str:
    return "" if score is None or score.bits_per_byte is None else with_error(score.bits_per_byte, score.bits_stderr)


def by_position(name: str, rows: Sequence[AtPositions]) -> BarGroup:
    """Draw the KL divergence by the length of the context."""
    longest = max(row.kl for row in rows) or 1.0
    bars = [Bar(_positions(row), max(row.kl, 0.0) / longest, number(row.kl)) for row in rows]
    return BarGroup(f"KL divergence by position, {name}", "position of the token in its window", bars)


def _positions(row: AtPositions) -> str:
    return f"{row.first}" if row.first == row.last else f"{row.first} to {row.last}"
