"""Section: the error of each block that a pass reconstructed, before and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from compress.report.curves import sparks
from compress.report.page.blocks import Block, Prose
from compress.report.page.charts import Grid, Line, LineChart, LineStyle
from compress.report.schema import Report
from compress.report.sections.base import Section

TEXT = "Error of each block's output before and after learning, from the first block to the last."


class BlockReconstruction(Section):
    """Curves of the block errors over the blocks of the model, for every pass that learns block by block."""

    title: ClassVar[str] = "Block reconstruction"
    order: ClassVar[int] = 80

    def render(self, report: Report) -> str | None:
        found = errors(report)
        if not found:
            return None
        curves = {
            f"{label}: {len(blocks)} blocks": [{"step": i, **errors} for i, errors in enumerate(blocks.values())]
            for label, blocks in found.items()
        }
        return f"{TEXT}\n\n```\n{sparks(curves)}\n```"

    def blocks(self, report: Report) -> Sequence[Block]:
        found = errors(report)
        styles: tuple[tuple[str, LineStyle], ...] = (("before", "base"), ("after", "main"))
        charts = [
            LineChart(
                label,
                [
                    Line(name, [(i, each[name]) for i, each in enumerate(blocks.values())], style)
                    for name, style in styles
                ],
                "block",
            )
            for label, blocks in found.items()
        ]
        return [Prose(TEXT), Grid(charts)] if charts else []


def errors(report: Report) -> dict[str, dict[str, dict[str, float]]]:
    """The error of each block before and after learning, by the label of the pass and by block."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for entry in report.journal.entries:
        figures = entry.figures
        if {"start", "learned"} <= figures.keys():
            label, _, block = entry.where.rpartition(" ")
            found[label][block] = {"before": figures["start"], "after": min(figures["start"], figures["learned"])}
    return found
