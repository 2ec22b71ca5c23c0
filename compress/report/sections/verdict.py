"""Section: the verdict in words, above everything else."""

from __future__ import annotations

from typing import ClassVar

from compress.report.schema import Report
from compress.report.sections.base import Section
from compress.report.verdict import of_report


class Verdict(Section):
    """A list with the sentences of `of_report`."""

    title: ClassVar[str] = "Verdict"
    order: ClassVar[int] = 5

    def render(self, report: Report) -> str:
        return "\n".join(f"- {sentence}" for sentence in of_report(report))
