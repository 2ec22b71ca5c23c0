"""Section: the error of each block that a pass reconstructed, before and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from compress.report.charts import ChartGrid, Line, LineChart
from compress.report.curves import sparks
from compress.report.page.blocks import PageBlock, Prose
from compress.report.sections.base import Section
from compress.results.result import RunResult

TEXT = "Error of each block's output before and after learning, from the first block to the last."


class BlockReconstructionSection(Section):
    """Curves of the block errors over the blocks of the model, for every pass that learns block by block."""

    title: ClassVar[str] = "Block reconstruction"
    order: ClassVar[int] = 80

    def render(self, result: RunResult) -> str | None:
        errors = block_errors(result)
        if not errors:
            return None
        curves = {
            f"{label}: {len(rows)} blocks": [{"step": i, **row} for i, row in enumerate(rows.values())]
            for label, rows in errors.items()
        }
        return f"{TEXT}\n\n```\n{sparks(curves)}\n```"

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        charts = []
        for label, rows in block_errors(result).items():
            before, after = (
                Line(name, [(float(i), row[name]) for i, row in enumerate(rows.values())], name == "before")
                for name in ("before", "after")
            )
            charts.append(LineChart(label, [after, before], "block", "error of the block's output"))
        return [Prose(TEXT), ChartGrid(charts)] if charts else []


def block_errors(result: RunResult) -> dict[str, dict[str, dict[str, float]]]:
    """Collect the errors of each block before and after learning, by the label of the pass and by block."""
    errors: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for entry in result.journal.entries:
        figures = entry.figures
        if {"start", "learned"} <= figures.keys():
            label, _, block = entry.where.rpartition(" ")
            errors[label][block] = {"before": figures["start"], "after": min(figures["start"], figures["learned"])}
    return errors
