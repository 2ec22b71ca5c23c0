"""Section: the journal of the run, equal messages on one line."""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

from compress.report.schema import Report
from compress.report.sections.base import Section


class Journal(Section):
    """A list with the lines of `lines`."""

    title: ClassVar[str] = "Journal"
    order: ClassVar[int] = 90

    def render(self, report: Report) -> str:
        return "\n".join(f"- {line}" for line in lines(report)) or "No fallbacks and no notes."


def lines(report: Report) -> list[str]:
    """One line per kind and message, with the first place and the number of further ones."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in report.journal.entries:
        places[entry.kind, entry.message].append(entry.where)
    return [
        f"{kind}: {message} ({where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''})"
        for (kind, message), where in places.items()
    ]
