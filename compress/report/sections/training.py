"""Section: the passes that trained, and their curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from compress.report.curves import FILE, Curve, series, sparks
from compress.report.page.blocks import Block, Table
from compress.report.page.charts import Grid, Line, LineChart
from compress.report.schema import Report
from compress.report.sections.base import Section, table

HEAD = ("pass", "steps", "loss, first quarter", "last quarter", "best held out", "seconds")


class Training(Section):
    """A table of losses, and the curves as text and as a picture."""

    title: ClassVar[str] = "Training"
    order: ClassVar[int] = 70

    def render(self, report: Report) -> str | None:
        if not report.training:
            return None
        curves = sparks({label: record.curve for label, record in report.training.items()})
        return f"{table(HEAD, rows(report))}\n\n```\n{curves}\n```\n\n![training]({FILE})"

    def blocks(self, report: Report) -> Sequence[Block]:
        if not report.training:
            return []
        charts = [chart for label, record in report.training.items() for chart in charts_of(label, record.curve)]
        return [Grid(charts), Table(HEAD, rows(report))]


def rows(report: Report) -> list[tuple[str, ...]]:
    """Rows of `HEAD`."""
    found = []
    for label, record in report.training.items():
        best = record.best
        held = "none" if best is None else f"{best.held_out:.4g} (step {best.step})"
        losses = f"{record.first_loss:.4g}", f"{record.last_loss:.4g}"
        found.append((label, str(record.steps), *losses, held, f"{record.seconds:.1f}"))
    return found


def charts_of(label: str, curve: Curve) -> Iterator[LineChart]:
    """The loss with that of held-out sequences, and each other value in a chart of its own."""
    found = series(curve)
    losses = {name: found.pop(name) for name in ("loss", "held out") if name in found}
    if losses:
        lines = [Line(name, points, "main" if name == "loss" else "base") for name, points in losses.items()]
        yield LineChart(f"{label}, loss", lines, "step")
    for name, points in found.items():
        yield LineChart(f"{label}, {name}", [Line(name, points)], "step")
