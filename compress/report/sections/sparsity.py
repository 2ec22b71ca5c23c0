"""Section: the requested sparsity, and the zeros of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.depth import heat_map
from compress.report.page.blocks import PageBlock, Prose, TextTable
from compress.report.sections.base import Section, table
from compress.results.measurements.sparsity import SparsityResult
from compress.results.result import RunResult

HEAD = ("layers", "requested", "expected", "achieved")
TERMS = "expected: in whole units of the pattern, without its dense tail; achieved: zeros counted in the checkpoint."


class SparsitySection(Section):
    """Means over all pruned layers, and the layers with the fewest and the most zeros."""

    title: ClassVar[str] = "Sparsity"
    order: ClassVar[int] = 50

    def render(self, result: RunResult) -> str | None:
        sparsity: SparsityResult | None = result.evaluations.get("sparsity")
        if sparsity is None:
            return None
        return f"Of {len(sparsity.layers)} layers; {TERMS}\n\n" + table(HEAD, rows(sparsity))

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        sparsity: SparsityResult | None = result.evaluations.get("sparsity")
        if sparsity is None:
            return []
        achieved = ((name, layer.achieved) for name, layer in sparsity.layers.items())
        chart = heat_map("Zeros of each layer", achieved, "fraction of zeros")
        text = f"Fractions of zeros of {len(sparsity.layers)} layers; {TERMS}"
        return [Prose(text), *([] if chart is None else [chart]), TextTable(HEAD, rows(sparsity))]


def rows(sparsity: SparsityResult) -> list[tuple[str, str, str, str]]:
    """List rows of `HEAD`."""
    layers = sorted(sparsity.layers.items(), key=lambda item: item[1].achieved)
    (least_name, least), (most_name, most) = layers[0], layers[-1]
    shown = {"all, by weight": sparsity, f"least: {least_name}": least, f"most: {most_name}": most}
    return [(name, f"{row.asked:.4f}", f"{row.due:.4f}", f"{row.achieved:.4f}") for name, row in shown.items()]
