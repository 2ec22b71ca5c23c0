"""Section: the passes that trained, and their curves."""

from __future__ import annotations

from typing import ClassVar

from compress.report.curves import FILE, sparks
from compress.report.schema import Report
from compress.report.sections.base import Section, table

HEAD = ("pass", "steps", "loss, first quarter", "last quarter", "best held out", "seconds")


class Training(Section):
    """A table of losses, and the curves as text and as a picture."""

    title: ClassVar[str] = "Training"
    order: ClassVar[int] = 70

    def render(self, report: Report) -> str | None:
        if not report.training:
            return None
        rows = []
        for label, record in report.training.items():
            best = record.best
            held = "none" if best is None else f"{best.held_out:.4g} (step {best.step})"
            losses = f"{record.first_loss:.4g}", f"{record.last_loss:.4g}"
            rows.append((label, str(record.steps), *losses, held, f"{record.seconds:.1f}"))
        curves = sparks({label: record.curve for label, record in report.training.items()})
        return f"{table(HEAD, rows)}\n\n```\n{curves}\n```\n\n![training]({FILE})"
