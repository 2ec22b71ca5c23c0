"""Section: the speed of both models, if the recipe requests it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.page.blocks import Bars, Details, PageBlock, Prose, TextTable, before_and_after
from compress.report.page.numbers import number
from compress.report.sections.base import Section, table
from compress.results.measurements.speed import SpeedResult
from compress.results.measurements.speed import table as rows
from compress.results.result import RunResult


class SpeedSection(Section):
    """A table of decoding, prefill and bytes per token."""

    title: ClassVar[str] = "Speed"
    order: ClassVar[int] = 25

    def render(self, result: RunResult) -> str | None:
        speed: SpeedResult | None = result.evaluations.get("speed")
        return None if speed is None else f"{machine(speed)}\n\n{table(('', *speed.models), rows(speed))}"

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        speed: SpeedResult | None = result.evaluations.get("speed")
        if speed is None:
            return []
        details = Details("All figures in one table", [TextTable(("", *speed.models), rows(speed))])
        if len(speed.models) < 2:
            return [Prose(machine(speed)), details]
        base, *_, compressed = speed.models.values()
        rates = [
            (f"Decoding, {batch} sequence{'s' if batch > 1 else ''}", rate, compressed.decode[batch])
            for batch, rate in base.decode.items()
        ]
        rates.append(("Prompt", base.prefill, compressed.prefill))
        groups = [
            before_and_after(name, f"tokens/s, {new / old:.2f}×", (old, new), (number(old), number(new)))
            for name, old, new in rates
        ]
        return [Prose(machine(speed)), Bars(groups), details]


def machine(speed: SpeedResult) -> str:
    """Describe the kernels and the bandwidth in a sentence."""
    return (
        f"Measured in turns in one run: {speed.instruction_set} kernels; threads: {speed.threads}; read bandwidth: "
        f"{speed.read_bandwidth / 1e9:.1f} GB/s."
    )
