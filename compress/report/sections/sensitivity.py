"""Section: sensitivity of the base model's layers, if the run's folder has such a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.page.blocks import Details, PageBlock
from compress.report.sections.base import Section, table
from compress.report.sensitivity import maps, most_sensitive
from compress.results.result import RunResult

LARGEST = 10  # layers listed; all are in report.json


class SensitivitySection(Section):
    """Heat maps of each choice, and the most sensitive layers; report.md has the layers."""

    title: ClassVar[str] = "Sensitivity of layers"
    order: ClassVar[int] = 42

    def render(self, result: RunResult) -> str | None:
        if result.sensitivity is None:
            return None
        worst = most_sensitive(result.sensitivity, LARGEST)
        return f"The {len(worst.rows)} most sensitive of the base model:\n\n{table(worst.head, worst.rows)}"

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        if result.sensitivity is None:
            return []
        worst = Details(f"The {LARGEST} most sensitive", [most_sensitive(result.sensitivity, LARGEST)])
        return [*maps(result.sensitivity), worst]
