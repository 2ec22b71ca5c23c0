"""Section: relative output errors of layers, by pass, and the layers with the largest errors."""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

from compress.report.schema import LayerRow, Report
from compress.report.sections.base import Section, table

LARGEST = 10  # layers listed in report.md; all are in report.json


class LayerErrors(Section):
    """Two tables: errors by pass, and the largest errors."""

    title: ClassVar[str] = "Relative output error of layers"
    order: ClassVar[int] = 40

    def render(self, report: Report) -> str:
        passes = table(("pass", "layers", "mean", "largest", "sparsity"), by_pass(report))
        return f"{passes}\n\nThe {LARGEST} largest:\n\n" + table(("layer", "pass", "error"), largest(report))


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
