"""Section: relative output errors of layers, by pass, and the layers with the largest errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import ClassVar

from compress.passes.contract.records import LayerResult
from compress.report.charts import HeatMap
from compress.report.depth import by_kind, heat_map, kind_and_depth
from compress.report.page.blocks import Details, PageBlock, Prose, TextTable
from compress.report.sections.base import Section, table
from compress.results.result import RunResult

KINDS = 12  # kinds of layers that are drawn, those with the largest errors
LARGEST = 10  # layers listed in report.md; all are in report.json


class LayerErrorsSection(Section):
    """Two tables: errors by pass, and the largest errors. The page draws the errors of each pass by depth."""

    title: ClassVar[str] = "Relative output error of layers"
    order: ClassVar[int] = 40

    def render(self, result: RunResult) -> str:
        passes = table(("pass", "layers", "mean", "largest", "sparsity"), by_pass(result))
        return f"{passes}\n\nThe {LARGEST} largest:\n\n" + table(("layer", "pass", "error"), largest(result))

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        if not result.layers:
            return []
        text = (
            "The change of each layer's output on calibration inputs, relative to the output: ‖(W′ − W) X‖ / ‖W X‖, by "
            "kind of layer and block."
        )
        tables: list[PageBlock] = [
            TextTable(("pass", "layers", "mean", "largest", "sparsity"), by_pass(result)),
            Details(f"The {LARGEST} largest", [TextTable(("layer", "pass", "error"), largest(result), frozenset({1}))]),
        ]
        return [Prose(text), *along_depth(result), *tables]


def along_depth(result: RunResult) -> Iterator[HeatMap]:
    """Draw the errors of each pass by depth, for the kinds of layers with the largest errors."""
    for label in dict.fromkeys(row.by for row in result.layers):
        errors = [(row.layer, row.error) for row in result.layers if row.by == label and row.error is not None]
        means = by_kind(errors)
        kinds = set(sorted(means, key=lambda kind: -max(means[kind].values()))[:KINDS])
        shown = [(layer, error) for layer, error in errors if kind_and_depth(layer)[0] in kinds]
        chart = heat_map(label, shown, "relative output error")
        if chart is not None:
            yield chart


def by_pass(result: RunResult) -> list[tuple[str, str, str, str, str]]:
    """List rows (pass, layers, mean and largest relative error of layer outputs, fraction of zeros)."""
    groups: dict[str, list[LayerResult]] = defaultdict(list)
    for row in result.layers:
        groups[row.by].append(row)
    rows = []
    for name, layers in groups.items():
        errors = [row.error for row in layers if row.error is not None] or [float("nan")]
        zeros = sum(row.sparsity for row in layers) / len(layers)
        mean, maximum = sum(errors) / len(errors), max(errors)
        rows.append((name, str(len(layers)), f"{mean:.4f}", f"{maximum:.4f}", f"{zeros:.3f}"))
    return rows


def largest(result: RunResult) -> list[tuple[str, str, str]]:
    """List rows (layer, pass, error) of the largest errors, in descending order."""
    rows = [(row.error, row) for row in result.layers if row.error is not None]
    rows.sort(key=lambda pair: -pair[0])
    return [(row.layer, row.by, f"{error:.4f}") for error, row in rows[:LARGEST]]
