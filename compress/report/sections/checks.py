"""Section: the checks after the checkpoint was read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.page.blocks import Block, Items
from compress.report.schema import Report
from compress.report.sections.base import Section


class Checks(Section):
    """A list with the lines of `lines`."""

    title: ClassVar[str] = "Checks"
    order: ClassVar[int] = 30

    def render(self, report: Report) -> str:
        return "\n".join(f"- {line}" for line in lines(report))

    def blocks(self, report: Report) -> Sequence[Block]:
        return [Items(lines(report))]


def lines(report: Report) -> list[str]:
    """One line per check."""
    found, written, predicted = report.verified, report.size.tensor_bytes, report.predicted.tensor_bytes
    as_planned = "as predicted by the plan"
    if predicted != written:
        as_planned = f"{predicted} were predicted before calibration chose the schemes of some layers"
    checked = [
        f"tensor bytes: {written}, {as_planned}",
        f"codes of {found.layers} layers read back bit for bit",
        f"reloaded by compress.load: outputs differ by at most {found.own:.3g}",
    ]
    if found.transformers is None:
        checked.append(f"not reloaded by transformers: {found.skipped}")
    else:
        checked.append(f"reloaded by transformers: outputs differ by at most {found.transformers:.3g}, weights equal")
    return checked
