"""Section: greedy answers to fixed prompts before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.evaluate.generation import Answer, GenerationResult
from compress.report.page.blocks import Block, Details, Pair, Table
from compress.report.schema import Report
from compress.report.sections.base import Section

HEAD = ("", "before", "after")


class Answers(Section):
    """How many answers end and repeat themselves, and all answers; report.md has the figures in its first table."""

    title: ClassVar[str] = "Answers"
    order: ClassVar[int] = 16

    def render(self, report: Report) -> str | None:
        return None

    def blocks(self, report: Report) -> Sequence[Block]:
        found: GenerationResult | None = report.evaluations.get("generation")
        if found is None:
            return []
        (ended, ends), (before, after) = found.ended, found.repetition
        rows = [
            ("answers that end", f"{ended:.0%}", f"{ends:.0%}"),
            ("repeated 4-grams", f"{before:.1%}", f"{after:.1%}"),
            ("equal tokens before they differ", f"{found.longest}", f"{found.agreement:.1f}"),
            ("equal answers", "100%", f"{found.same:.0%}"),
        ]
        pairs = [
            Details(one.prompt + _changed(one, other), [Pair(("before", "after"), (one.text, other.text))])
            for one, other in zip(found.base, found.compressed, strict=True)
        ]
        return [Table(HEAD, rows), Details(f"All {found.prompts} answers", pairs)]


def _changed(one: Answer, other: Answer) -> str:
    return " (equal)" if one.text == other.text else ""
