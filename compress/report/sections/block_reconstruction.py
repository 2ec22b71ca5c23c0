"""Section: the error of each block that a pass reconstructed, before and after."""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

from compress.report.curves import sparks
from compress.report.schema import Report
from compress.report.sections.base import Section


class BlockReconstruction(Section):
    """Curves of the block errors over the blocks of the model, for every pass that learns block by block."""

    title: ClassVar[str] = "Block reconstruction"
    order: ClassVar[int] = 80

    def render(self, report: Report) -> str | None:
        found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
        for entry in report.journal.entries:
            figures = entry.figures
            if {"start", "learned"} <= figures.keys():
                label, _, block = entry.where.rpartition(" ")
                found[label][block] = {"before": figures["start"], "after": min(figures["start"], figures["learned"])}
        if not found:
            return None
        curves = {
            f"{label}: {len(blocks)} blocks": [{"step": i, **errors} for i, errors in enumerate(blocks.values())]
            for label, blocks in found.items()
        }
        text = "Error of each block's output before and after learning, from the first block to the last."
        return f"{text}\n\n```\n{sparks(curves)}\n```"
