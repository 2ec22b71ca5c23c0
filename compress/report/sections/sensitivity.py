"""Section: sensitivity of the base model's layers, if the run's folder holds a file of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.page.blocks import Block, Details
from compress.report.schema import Report
from compress.report.sections.base import Section, table
from compress.report.sensitivity import maps, most_sensitive

LARGEST = 10  # layers listed; all are in report.json


class Sensitivity(Section):
    """Heat maps of each choice, and the most sensitive layers; report.md has the layers."""

    title: ClassVar[str] = "Sensitivity of layers"
    order: ClassVar[int] = 42

    def render(self, report: Report) -> str | None:
        if report.sensitivity is None:
            return None
        found = most_sensitive(report.sensitivity, LARGEST)
        return f"The {len(found.rows)} most sensitive of the base model:\n\n{table(found.head, found.rows)}"

    def blocks(self, report: Report) -> Sequence[Block]:
        if report.sensitivity is None:
            return []
        worst = Details(f"The {LARGEST} most sensitive", [most_sensitive(report.sensitivity, LARGEST)])
        return [*maps(report.sensitivity), worst]
