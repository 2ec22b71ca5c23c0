"""Section: time and peak memory of every phase of the run."""

from __future__ import annotations

from typing import ClassVar

from compress.report.schema import Report
from compress.report.sections.base import MB, Section, table

HEAD = ("phase", "seconds", "peak memory, MB")


class TimeAndMemory(Section):
    """A table with the rows of `rows`."""

    title: ClassVar[str] = "Time and memory"
    order: ClassVar[int] = 20

    def render(self, report: Report) -> str:
        return table(HEAD, rows(report))


def rows(report: Report) -> list[tuple[str, str, str]]:
    """Rows (phase, seconds, MB)."""
    return [(name, f"{cost.seconds:.1f}", f"{cost.peak_bytes / MB:.0f}") for name, cost in report.costs.items()]
