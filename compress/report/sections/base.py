"""Section: one part of the report, as Markdown and as the blocks of its HTML page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from compress.report.names import escaped
from compress.report.page.blocks import Code, PageBlock
from compress.results.result import RunResult


class Section(ABC):
    """One section of report.md and report.html.

    Attributes:
        title: Its heading.
        order: Sections are sorted by it.
    """

    title: ClassVar[str]
    order: ClassVar[int]

    @abstractmethod
    def render(self, result: RunResult) -> str | None:
        """Return the Markdown below the heading; None leaves the section out of report.md."""

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        """Return the content below the heading of report.html; none leaves the section out.

        By default it is the Markdown as text.
        """
        text = self.render(result)
        return [] if text is None else [Code(text)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; cells are plain text."""
    lines = [head, ["---"] * len(head), *(map(escaped, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
