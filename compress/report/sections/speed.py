"""Section: the speed of both models, if the recipe asked for it."""

from __future__ import annotations

from typing import ClassVar

from compress.evaluate.speed import SpeedResult
from compress.evaluate.speed import table as rows
from compress.report.schema import Report
from compress.report.sections.base import Section, table


class Speed(Section):
    """A table of decoding, prefill and bytes per token."""

    title: ClassVar[str] = "Speed"
    order: ClassVar[int] = 25

    def render(self, report: Report) -> str | None:
        found: SpeedResult | None = report.evaluations.get("speed")
        if found is None:
            return None
        machine = (
            f"Measured in turns in one run: {found.instruction_set} kernels, {found.threads} threads, which read "
            f"{found.read_bandwidth / 1e9:.1f} GB/s."
        )
        return f"{machine}\n\n{table(('', *found.models), rows(found))}"
