"""The journal of a run: notes, fallbacks with their reasons, and progress for listeners.

No module below the command line prints. Everything that a user should know is an entry; the report counts the entries,
and the command line shows them as they arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One line of the journal.

    kind: 'fallback' (a deviation from the recipe), 'note' or 'progress'. where: the pass and module concerned.
    figures: the numbers of the message.
    """

    kind: str
    where: str
    message: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Journal:
    """Entries in order, and listeners that receive each entry immediately (a progress bar, a log)."""

    entries: list[Entry] = field(default_factory=list)
    listeners: list[Callable[[Entry], None]] = field(default_factory=list)

    def add(self, kind: str, where: str, message: str, **figures: Any) -> None:
        """Record an entry and pass it to the listeners; progress is passed on but not recorded."""
        entry = Entry(kind, where, message, figures)
        if kind != "progress":
            self.entries.append(entry)
        for listener in self.listeners:
            listener(entry)

    def counts(self) -> dict[str, int]:
        """The number of entries of each kind."""
        found: dict[str, int] = {}
        for entry in self.entries:
            found[entry.kind] = found.get(entry.kind, 0) + 1
        return found
