"""Section: the passes that trained, and their curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.charts import ChartGrid
from compress.report.curves import CURVES, sparks, training_charts
from compress.report.page.blocks import PageBlock, TextTable
from compress.report.sections.base import Section, table
from compress.results.result import RunResult

HEAD = ("pass", "steps", "loss, first quarter", "last quarter", "best held out", "seconds")
STREAM_HEAD = ("pass", "stream", "process", "sequences", "documents", "tokens", "begun", "sha256")


class TrainingSection(Section):
    """A table of losses, and the curves as text and as a picture."""

    title: ClassVar[str] = "Training"
    order: ClassVar[int] = 70

    def render(self, result: RunResult) -> str | None:
        if not result.training:
            return None
        curves = sparks({label: record.curve for label, record in result.training.items()})
        image = f"\n\n![training]({CURVES})" if training_charts(result) else ""
        streams = f"\n\n{table(STREAM_HEAD, stream_rows(result))}" if stream_rows(result) else ""
        return f"{table(HEAD, rows(result))}{streams}\n\n```\n{curves}\n```{image}"

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        if not result.training:
            return []
        charts = training_charts(result)
        streams = [TextTable(STREAM_HEAD, stream_rows(result))] if stream_rows(result) else []
        return [*([ChartGrid(charts)] if charts else []), TextTable(HEAD, rows(result)), *streams]


def rows(result: RunResult) -> list[tuple[str, ...]]:
    """List rows of `HEAD`."""
    lines = []
    for label, record in result.training.items():
        best = record.best
        best_text = "none" if best is None else f"{best.held_out:.4g} (step {best.step})"
        losses = f"{record.first_loss:.4g}", f"{record.last_loss:.4g}"
        lines.append((label, str(record.steps), *losses, best_text, f"{record.seconds:.1f}"))
    return lines


def stream_rows(result: RunResult) -> list[tuple[str, ...]]:
    """List rows of `STREAM_HEAD`."""
    return [
        (
            label,
            use.text,
            str(use.rank),
            f"{use.sequences:,}",
            f"{use.documents:,}",
            f"{use.tokens:,}",
            "once" if use.rounds == 1 else f"{use.rounds} times",
            use.sha256[:12],
        )
        for label, record in result.training.items()
        for use in record.streams
    ]
