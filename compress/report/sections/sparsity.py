"""Section: the sparsity asked for, and the zeros of the checkpoint."""

from __future__ import annotations

from typing import ClassVar

from compress.evaluate.sparsity import SparsityResult
from compress.report.schema import Report
from compress.report.sections.base import Section, table


class Sparsity(Section):
    """Means over all pruned layers, and the layers with the fewest and the most zeros."""

    title: ClassVar[str] = "Sparsity"
    order: ClassVar[int] = 50

    def render(self, report: Report) -> str | None:
        found: SparsityResult | None = report.evaluations.get("sparsity")
        if found is None:
            return None
        layers = sorted(found.layers.items(), key=lambda item: item[1].achieved)
        (least, fewest), (most, highest) = layers[0], layers[-1]
        shown = {"all, by weight": found, f"least: {least}": fewest, f"most: {most}": highest}
        rows = [
            (name, f"{row.asked:.4f}", f"{row.due:.4f}", f"{row.achieved:.4f}") for name, row in shown.items()
        ]  # fmt: skip
        terms = "due: in whole units of the pattern, without its dense tail; achieved: zeros counted in the checkpoint."
        return f"Of {len(layers)} layers; {terms}\n\n" + table(("layers", "asked", "due", "achieved"), rows)
