"""Section: the sparsity asked for, and the zeros of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.evaluate.sparsity import SparsityResult
from compress.report.depth import heat_map
from compress.report.page.blocks import Block, Prose, Table
from compress.report.schema import Report
from compress.report.sections.base import Section, table

HEAD = ("layers", "asked", "due", "achieved")
TERMS = "due: in whole units of the pattern, without its dense tail; achieved: zeros counted in the checkpoint."


class Sparsity(Section):
    """Means over all pruned layers, and the layers with the fewest and the most zeros."""

    title: ClassVar[str] = "Sparsity"
    order: ClassVar[int] = 50

    def render(self, report: Report) -> str | None:
        found: SparsityResult | None = report.evaluations.get("sparsity")
        if found is None:
            return None
        return f"Of {len(found.layers)} layers; {TERMS}\n\n" + table(HEAD, rows(found))

    def blocks(self, report: Report) -> Sequence[Block]:
        found: SparsityResult | None = report.evaluations.get("sparsity")
        if found is None:
            return []
        heat = heat_map((name, layer.achieved) for name, layer in found.layers.items())
        drawn = [] if heat is None else [heat]
        return [Prose(f"Shares of zeros of {len(found.layers)} layers; {TERMS}"), *drawn, Table(HEAD, rows(found))]


def rows(found: SparsityResult) -> list[tuple[str, str, str, str]]:
    """Rows of `HEAD`."""
    layers = sorted(found.layers.items(), key=lambda item: item[1].achieved)
    (least, fewest), (most, highest) = layers[0], layers[-1]
    shown = {"all, by weight": found, f"least: {least}": fewest, f"most: {most}": highest}
    return [(name, f"{row.asked:.4f}", f"{row.due:.4f}", f"{row.achieved:.4f}") for name, row in shown.items()]
