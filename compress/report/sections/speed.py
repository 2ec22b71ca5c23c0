"""Section: the speed of both models, if the recipe asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.evaluate.speed import SpeedResult
from compress.evaluate.speed import table as rows
from compress.report.page.blocks import Bars, Block, Details, Prose, Table, before_and_after
from compress.report.page.numbers import number
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
        return f"{machine(found)}\n\n{table(('', *found.models), rows(found))}"

    def blocks(self, report: Report) -> Sequence[Block]:
        found: SpeedResult | None = report.evaluations.get("speed")
        if found is None:
            return []
        first, *_, last = [*found.models.values()] * 2
        rates = [
            (f"Decoding, {batch} sequence{'s' if batch > 1 else ''}", rate, last.decode[batch])
            for batch, rate in first.decode.items()
        ]
        rates.append(("Prompt", first.prefill, last.prefill))
        groups = [
            before_and_after(name, f"tokens/s, {after / before:.2f}×", (before, after), (number(before), number(after)))
            for name, before, after in rates
        ]
        details = Details("All figures in one table", [Table(("", *found.models), rows(found))])
        return [Prose(machine(found)), *([Bars(groups)] if len(found.models) > 1 else []), details]


def machine(found: SpeedResult) -> str:
    """The kernels and the bandwidth, in a sentence."""
    return (
        f"Measured in turns in one run: {found.instruction_set} kernels; threads: {found.threads}; read bandwidth: "
        f"{found.read_bandwidth / 1e9:.1f} GB/s."
    )
