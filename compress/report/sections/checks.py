"""Section: the checks after the checkpoint was read back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.names import escaped
from compress.report.page.blocks import Items, PageBlock
from compress.report.sections.base import Section
from compress.results.result import RunResult


class ChecksSection(Section):
    """A list with the lines of `lines`."""

    title: ClassVar[str] = "Checks"
    order: ClassVar[int] = 30

    def render(self, result: RunResult) -> str:
        return "\n".join(f"- {escaped(line)}" for line in lines(result))

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        return [Items(lines(result))]


def lines(result: RunResult) -> list[str]:
    """Return one line per check."""
    verified, written, predicted = result.verified, result.size.tensor_bytes, result.predicted.tensor_bytes
    as_planned = "as predicted by the plan"
    if predicted != written:
        as_planned = f"{predicted} were predicted before calibration chose the schemes of some layers"
    checked = [
        f"tensor bytes: {written}, {as_planned}",
        f"codes of {verified.layers} layers read back bit for bit",
        f"reloaded by compress.load: outputs differ by at most {verified.own:.3g}",
    ]
    if verified.transformers is None:
        checked.append(f"not reloaded by transformers: {verified.skipped}")
    else:
        checked.append(
            f"reloaded by transformers: outputs differ by at most {verified.transformers:.3g}, weights equal"
        )
    return checked + [f"failed: {key}: {reason}" for key, reason in result.failed.items()]
