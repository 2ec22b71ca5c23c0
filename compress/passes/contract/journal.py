"""The journal of a run: notes, fallbacks with their reasons, and progress for listeners.

No module below the command line prints. Everything that a user should know is an entry; the report counts the entries,
and the command line shows them as they arrive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
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

    @property
    def place(self) -> str:
        """The pass and module with the figures, such as 'passes[0] gptq model.layers.0 (linears 9, tokens 0)'."""
        figures = [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.figures.items()
        ]
        return f"{self.where} ({', '.join(figures)})" if figures else self.where


@dataclass
class Journal:
    """Entries in order, and listeners that receive each entry immediately (a progress bar, a log).

    A listener may raise: that stops the run, and the same call continues it.
    """

    entries: list[JournalEntry] = field(default_factory=list)
    listeners: list[Callable[[JournalEntry], None]] = field(default_factory=list)
    _held: list[JournalEntry] | None = field(default=None, init=False, repr=False, compare=False)

    def add(self, kind: str, where: str, message: str, **figures: Any) -> None:
        """Record an entry and pass it to the listeners; entries of `PASSING` kinds are passed on but not recorded."""
        entry = JournalEntry(kind, where, message, figures)
        if kind == "fallback" and self._held is not None:
            self._held.append(entry)
        else:
            self._tell(entry)

    def _tell(self, entry: JournalEntry) -> None:
        if entry.kind not in PASSING:
            self.entries.append(entry)
        for listener in self.listeners:
            listener(entry)

    @contextmanager
    def apart(self) -> Iterator[list[JournalEntry]]:
        """Collect the entries of the context in the yielded list instead of the journal; listeners do not hear them."""
        entries, heard, held = self.entries, self.listeners, self._held
        self.entries, self.listeners, self._held = [], [], None
        try:
            yield self.entries
        finally:
            self.entries, self.listeners, self._held = entries, heard, held

    @contextmanager
    def one_per_block(self, label: str, block: str, linears: Collection[str]) -> Iterator[None]:
        """Write equal fallbacks of several linears as one entry at the end of the context.

        A mixture has hundreds of linears in one block. The entry of several has the number of linears, the name of the
        first, and the figures of all: one number, or the smallest and the largest.

        Args:
            label: label of the pass.
            block: name of the block.
            linears: names of its linears in the block. The message of a block pass may begin with some of them:
                'a, b: message'.
        """
        before, self._held = self._held, []
        try:
            yield
        finally:
            held, self._held = self._held, before
            by_message: dict[str, list[tuple[list[str], JournalEntry]]] = defaultdict(list)
            for entry in held or ():
                names, message = _of_linears(entry, f"{label} {block}", linears)
                by_message[message].append((names, entry))
            for message, members in by_message.items():
                self._tell(members[0][1] if len(members) == 1 else _merged(f"{label} {block}", message, members))

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


def _of_linears(entry: JournalEntry, place: str, linears: Collection[str]) -> tuple[list[str], str]:
    """Return the linears that an entry is about, and its message without them; without names: an entry about others."""
    if entry.where.startswith(place + ".") and (name := entry.where.removeprefix(place + ".")) in linears:
        return [name], entry.message
    before, separator, message = entry.message.partition(": ")
    names = before.split(", ")
    if entry.where == place and separator and all(name in linears for name in names):
        return names, message
    return [], entry.message


def _merged(place: str, message: str, members: list[tuple[list[str], JournalEntry]]) -> JournalEntry:
    """Return one entry for equal messages."""
    names = [name for linears, _ in members for name in linears]
    all_figures = [entry.figures for _, entry in members]
    figures: dict[str, Any] = {"linears": len(names), "first": names[0]} if names else {"times": len(members)}
    for key, value in all_figures[0].items():
        values = [own[key] for own in all_figures if isinstance(own.get(key), int | float)]
        if values:
            low, high = min(values), max(values)
            figures[key] = low if low == high else f"{_short(low)} to {_short(high)}"
        elif all(own.get(key) == value for own in all_figures):
            figures[key] = value
    return JournalEntry("fallback", place, message, figures)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
