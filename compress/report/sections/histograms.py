"""Section: distributions of weights and inputs before and after, for the layers with the largest errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.page.blocks import Block, Heading, Prose
from compress.report.page.charts import Grid, HistogramChart
from compress.report.page.numbers import number
from compress.report.schema import LayerRow, Report
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
        found = [block for row in worst for block in _of_layer(row)]
        text = "Numbers of values in equal bins, on a logarithmic scale. Inputs are those of the calibration text."
        return [Prose(text), *found] if found else []


def _of_layer(row: LayerRow) -> list[Block]:
    """The charts of a layer below its name."""
    assert row.histograms is not None and row.error is not None
    known = {"weights": row.histograms.weights, "inputs": row.histograms.inputs}
    charts = [HistogramChart(name, found) for name, found in known.items() if found is not None]
    return [Heading(row.layer, f"{row.by}, relative output error {number(row.error)}"), Grid(charts)]
