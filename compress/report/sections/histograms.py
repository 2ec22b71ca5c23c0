"""Section: distributions of weights and inputs before and after, for the layers with the largest errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.passes.contract.records import LayerResult
from compress.report.charts import ChartGrid, HistogramChart
from compress.report.page.blocks import Heading, PageBlock, Prose
from compress.report.page.numbers import number
from compress.report.sections.base import Section
from compress.results.result import RunResult

SHOWN = 4  # layers; report.json has those of every block

TEXT = (
    "Distributions before and after the pass, in equal bins; the axis of counts is logarithmic. Inputs are those of "
    "the calibration text."
)


class HistogramsSection(Section):
    """Charts of the layers with the largest errors; report.md has none."""

    title: ClassVar[str] = "Weights and inputs of the worst layers"
    order: ClassVar[int] = 45

    def render(self, result: RunResult) -> str | None:
        return None

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        rows = [(row.error, row) for row in result.layers if row.histograms is not None and row.error is not None]
        worst = [row for _, row in sorted(rows, key=lambda pair: -pair[0])[:SHOWN]]
        blocks = [block for row in worst for block in _of_layer(row)]
        return [Prose(TEXT), *blocks] if blocks else []


def _of_layer(row: LayerResult) -> list[PageBlock]:
    """The charts of a layer below its name."""
    assert row.histograms is not None and row.error is not None
    histograms = (
        ("Weights", row.histograms.weights, "value of a weight"),
        ("Inputs", row.histograms.inputs, "value of an input"),
    )
    charts = [HistogramChart(title, counts, x_name) for title, counts, x_name in histograms if counts is not None]
    return [Heading(row.layer, f"{row.by}, relative output error {number(row.error)}"), ChartGrid(charts)]
