"""Section: distributions of weights and inputs before and after, for the layers with the largest errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.page.blocks import Block, Prose
from compress.report.page.charts import Grid, HistogramChart
from compress.report.page.numbers import number
from compress.report.schema import Report
from compress.report.sections.base import Section

SHOWN = 4  # layers; report.json has those of every block


class Histograms(Section):
    """Charts of the layers with the largest errors; report.md has none."""

    title: ClassVar[str] = "Weights and inputs of the worst layers"
    order: ClassVar[int] = 45

    def render(self, report: Report) -> str | None:
        return None

    def blocks(self, report: Report) -> Sequence[Block]:
        known = [(row.error, row) for row in report.layers if row.histograms is not None and row.error is not None]
        worst = [row for _, row in sorted(known, key=lambda pair: -pair[0])[:SHOWN]]
        charts = []
        for row in worst:
            assert row.histograms is not None and row.error is not None
            for name, found in (("weights", row.histograms.weights), ("inputs", row.histograms.inputs)):
                if found is not None:
                    charts.append(HistogramChart(f"{row.layer}, {name} ({row.by}, error {number(row.error)})", found))
        text = "Numbers of values in equal bins, on a logarithmic scale. Inputs are those of the calibration text."
        return [Prose(text), Grid(charts)] if charts else []
