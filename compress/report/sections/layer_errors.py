"""Section: relative output errors of layers, by pass, and the layers with the largest errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from compress.report.depth import by_kind
from compress.report.page.blocks import Block, Details, Heading, Prose, Table
from compress.report.page.charts import Grid, Line, LineChart
from compress.report.page.numbers import span
from compress.report.schema import LayerRow, Report
from compress.report.sections.base import Section, table

KINDS = 12  # kinds of layers that are drawn, those with the largest errors
LARGEST = 10  # layers listed in report.md; all are in report.json


class LayerErrors(Section):
    """Two tables: errors by pass, and the largest errors. The page draws the errors of each pass along the depth."""

    title: ClassVar[str] = "Relative output error of layers"
    order: ClassVar[int] = 40

    def render(self, report: Report) -> str:
        passes = table(("pass", "layers", "mean", "largest", "sparsity"), by_pass(report))
        return f"{passes}\n\nThe {LARGEST} largest:\n\n" + table(("layer", "pass", "error"), largest(report))

    def blocks(self, report: Report) -> Sequence[Block]:
        if not report.layers:
            return []
        text = (
            "The change of each layer's output on calibration inputs, relative to the output: ‖(W′ − W) X‖ / ‖W X‖. "
            "A panel for each kind of layer, from the first block to the last; the other kinds are in gray."
        )
        tables: list[Block] = [
            Table(("pass", "layers", "mean", "largest", "sparsity"), by_pass(report)),
            Details(f"The {LARGEST} largest", [Table(("layer", "pass", "error"), largest(report), frozenset({1}))]),
        ]
        return [Prose(text), *along_depth(report), *tables]


def along_depth(report: Report) -> Iterator[Block]:
    """For each pass the errors by depth, a chart for each kind of layer."""
    labels = list(dict.fromkeys(row.by for row in report.layers))
    for label in labels:
        errors = [(row.layer, row.error) for row in report.layers if row.by == label and row.error is not None]
        kinds = {kind: [*depths.items()] for kind, depths in by_kind(errors).items() if len(depths) > 1}
        most = sorted(kinds, key=lambda kind: -max(y for _, y in kinds[kind]))[:KINDS]
        kinds = {kind: points for kind, points in kinds.items() if kind in most}
        if not kinds:
            continue
        y = span([y for points in kinds.values() for _, y in points], zero=True)
        if len(labels) > 1:
            yield Heading(label)
        yield Grid([LineChart(kind, lines_of(kind, kinds), "block", y, 96) for kind in kinds], small=True)


def lines_of(kind: str, kinds: Mapping[str, Sequence[tuple[float, float]]]) -> list[Line]:
    """The line of a kind above the faint lines of the others."""
    return [*(Line(other, kinds[other], "faint") for other in kinds if other != kind), Line(kind, kinds[kind])]


def by_pass(report: Report) -> list[tuple[str, str, str, str, str]]:
    """Rows (pass, layers, mean and largest relative error of layer outputs, share of zeros)."""
    groups: dict[str, list[LayerRow]] = defaultdict(list)
    for row in report.layers:
        groups[row.by].append(row)
    rows = []
    for name, layers in groups.items():
        errors = [row.error for row in layers if row.error is not None] or [float("nan")]
        zeros = sum(row.sparsity for row in layers) / len(layers)
        mean, most = sum(errors) / len(errors), max(errors)
        rows.append((name, str(len(layers)), f"{mean:.4f}", f"{most:.4f}", f"{zeros:.3f}"))
    return rows


def largest(report: Report) -> list[tuple[str, str, str]]:
    """Rows (layer, pass, error) of the largest errors, in descending order."""
    known = [(row.error, row) for row in report.layers if row.error is not None]
    known.sort(key=lambda pair: -pair[0])
    return [(row.layer, row.by, f"{error:.4f}") for error, row in known[:LARGEST]]
