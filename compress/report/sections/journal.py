"""Section: the journal of the run, equal messages on one line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from compress.report.page.blocks import Block, Entry, Prose
from compress.report.schema import JournalEntry, Report
from compress.report.sections.base import Section

SHOWN = 2000  # places of one message, as of the experts of a large model
QUIET = "No fallbacks and no notes."


class Journal(Section):
    """A list with the lines of `lines`."""

    title: ClassVar[str] = "Journal"
    order: ClassVar[int] = 90

    def render(self, report: Report) -> str:
        return "\n".join(f"- {line}" for line in lines(report)) or QUIET

    def blocks(self, report: Report) -> Sequence[Block]:
        groups = [Entry(kind, message, _shortened(places)) for (kind, message), places in grouped(report).items()]
        ordered = sorted(groups, key=lambda group: group.kind != "fallback")
        return ordered or [Prose(QUIET)]


def _shortened(places: list[str]) -> list[str]:
    """At most `SHOWN` places, and the number of the others."""
    more = len(places) - SHOWN
    return [*places[:SHOWN], f"and {more} more in report.json"] if more > 0 else places


def grouped(report: Report) -> dict[tuple[str, str], list[str]]:
    """The places of all entries with their figures, by (kind, message)."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in report.journal.entries:
        found[entry.kind, entry.message].append(_place(entry))
    return found


def _place(entry: JournalEntry) -> str:
    figures = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in entry.figures.items()
    ]
    return f"{entry.where} ({', '.join(figures)})" if figures else entry.where


def lines(report: Report) -> list[str]:
    """One line per kind and message, with the first place and the number of further ones."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in report.journal.entries:
        places[entry.kind, entry.message].append(entry.where)
    return [
        f"{kind}: {message} ({where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''})"
        for (kind, message), where in places.items()
    ]
