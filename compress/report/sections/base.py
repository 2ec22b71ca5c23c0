"""Section: one part of the report, as Markdown and as the blocks of its HTML page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from compress.report.page.blocks import Block, Code
from compress.report.schema import Report

MB = 1e6


class Section(ABC):
    """One section of report.md and report.html. title: its heading. order: sections are sorted by it."""

    title: ClassVar[str]
    order: ClassVar[int]

    @abstractmethod
    def render(self, report: Report) -> str | None:
        """The Markdown below the heading; None leaves the section out of report.md."""

    def blocks(self, report: Report) -> Sequence[Block]:
        """The content below the heading of report.html; none leaves the section out. Default: the Markdown as text."""
        text = self.render(report)
        return [] if text is None else [Code(text)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
