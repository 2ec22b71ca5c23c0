"""Section: one part of report.md, and the table that most sections consist of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from compress.report.schema import Report

MB = 1e6


class Section(ABC):
    """One section of report.md. title: its heading. order: sections are sorted by it."""

    title: ClassVar[str]
    order: ClassVar[int]

    @abstractmethod
    def render(self, report: Report) -> str | None:
        """The Markdown below the heading; None leaves the section out."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
