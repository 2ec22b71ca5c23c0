"""The journal of a run: what was done, every fallback with its reason, and progress for whoever listens.

Nothing below the command line prints. Whatever a user should know is an entry here; the report counts the
entries, and the command line shows them as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PASSING = frozenset({"progress", "block", "segment"})
"""Kinds of entries that listeners hear and the journal does not keep."""


@dataclass(frozen=True)
class Entry:
    """One line of the journal.

    kind: 'fallback' (something was done another way than asked), 'note', or one that is not kept: 'progress', 'block'
    (a finished block is on disk, a killed run goes on after it; message: its name), 'segment' (so is the whole model,
    between two segments of the run; message: the last pass that has worked on it).
    where: the pass and module concerned. figures: numbers that belong to the message.
    """

    kind: str
    where: str
    message: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Journal:
    """Entries in order, and listeners that see each entry at once (a progress bar, a log).

    A listener may raise: that stops the run, and the same call continues it.
    """

    entries: list[Entry] = field(default_factory=list)
    listeners: list[Callable[[Entry], None]] = field(default_factory=list)

    def add(self, kind: str, where: str, message: str, **figures: Any) -> None:
        """Record an entry and show it to the listeners; those of `PASSING` kinds are shown but not kept."""
        entry = Entry(kind, where, message, figures)
        if kind not in PASSING:
            self.entries.append(entry)
        for listener in self.listeners:
            listener(entry)

    def counts(self) -> dict[str, int]:
        """How many entries there are of each kind."""
        found: dict[str, int] = {}
        for entry in self.entries:
            found[entry.kind] = found.get(entry.kind, 0) + 1
        return found
