"""Section: the journal of the run, equal messages on one line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

from compress.report.names import escaped
from compress.report.page.blocks import JournalItem, PageBlock, Prose
from compress.report.sections.base import Section
from compress.results.result import RunResult

SHOWN = 2000  # places of one message, as of the experts of a large model
QUIET = "No warnings and no notes."
ALERT = "warning"
"""The label of the entries that come first."""


class JournalSection(Section):
    """A list with the lines of `lines`."""

    title: ClassVar[str] = "Journal"
    order: ClassVar[int] = 90

    def render(self, result: RunResult) -> str:
        return "\n".join(f"- {escaped(line)}" for line in lines(result)) or QUIET

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        groups = [
            JournalItem(label, message, _shortened(places)) for (label, message), places in grouped(result).items()
        ]
        ordered = sorted(groups, key=lambda group: group.label != ALERT)
        return ordered or [Prose(QUIET)]


def _shortened(places: list[str]) -> list[str]:
    """At most `SHOWN` places, and the number of further ones."""
    hidden = len(places) - SHOWN
    return [*places[:SHOWN], f"and {hidden} more in report.json"] if hidden > 0 else places


def grouped(result: RunResult) -> dict[tuple[str, str], list[str]]:
    """Collect the places of all entries with their figures, by (label, message)."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in result.journal.entries:
        places[entry.label, entry.message].append(entry.place)
    return places


def lines(result: RunResult) -> list[str]:
    """Return one line per label and message, with the first place and the number of further ones."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in result.journal.entries:
        places[entry.label, entry.message].append(entry.where)
    return [
        f"{label}: {message} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
        for (label, message), names in places.items()
    ]
