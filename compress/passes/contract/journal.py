"""The journal of a run: notes, fallbacks with their reasons, and progress for listeners.

No module below the command line prints. Everything that a user should know is an entry; the report counts the entries,
and the command line shows them as they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PASSING = frozenset({"progress", "block", "segment"})
"""Kinds of entries that listeners hear and the journal does not keep."""


@dataclass(frozen=True)
class JournalEntry:
    """One line of the journal.

    Attributes:
        kind: 'warning' (the evidence flatters the model), 'fallback' (a deviation from the recipe), 'note', or a kind
            that is not recorded: 'progress'; 'block' (a finished block is on disk, a killed run continues after it;
            message: its name); 'segment' (the whole model is on disk between two segments of the run; message: the last
            pass that worked on it).
        where: the pass and module concerned.
        figures: the numbers of the message.
    """

    kind: str
    where: str
    message: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The word that introduces the message to a reader: a fallback is a warning too."""
        return "warning" if self.kind == "fallback" else self.kind


@dataclass
class Journal:
    """Entries in order, and listeners that receive each entry immediately (a progress bar, a log).

    A listener may raise: that stops the run, and the same call continues it.
    """

    entries: list[JournalEntry] = field(default_factory=list)
    listeners: list[Callable[[JournalEntry], None]] = field(default_factory=list)

    def add(self, kind: str, where: str, message: str, **figures: Any) -> None:
        """Record an entry and pass it to the listeners; entries of `PASSING` kinds are passed on but not recorded."""
        entry = JournalEntry(kind, where, message, figures)
        if kind not in PASSING:
            self.entries.append(entry)
        for listener in self.listeners:
            listener(entry)

    @contextmanager
    def apart(self) -> Iterator[list[JournalEntry]]:
        """Collect the entries of the context in the yielded list instead of the journal; listeners do not hear them."""
        entries, heard = self.entries, self.listeners
        self.entries, self.listeners = [], []
        try:
            yield self.entries
        finally:
            self.entries, self.listeners = entries, heard

    def replay(self, entries: Iterable[JournalEntry]) -> None:
        """Add entries of another journal."""
        for entry in entries:
            self.add(entry.kind, entry.where, entry.message, **entry.figures)

    def counts(self) -> dict[str, int]:
        """Return the number of entries of each kind."""
        counts: dict[str, int] = {}
        for entry in self.entries:
            counts[entry.kind] = counts.get(entry.kind, 0) + 1
        return counts
