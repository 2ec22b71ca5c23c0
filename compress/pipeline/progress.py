"""The progress of a run on standard error: a bar on a terminal, and a line for every tenth elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from compress.passes.contract.journal import Journal, JournalEntry


@contextmanager
def shown_progress(journal: Journal, console: Console | None = None) -> Iterator[None]:
    """Show the entries of a journal while the context is open.

    console: by default standard error. A notebook gets plain lines, since a bar there needs further packages.
    """
    console = console or Console(stderr=True, markup=False, force_jupyter=False)
    shown = ProgressDisplay(console)
    journal.listeners.append(shown.hear)
    try:
        yield
    finally:
        journal.listeners.remove(shown.hear)
        shown.stop()


class ProgressDisplay:
    """A progress bar with block, pass and time left; without a terminal, a line for every tenth."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._record: set[tuple[str, int]] = set()

    def stop(self) -> None:
        """Leave the bar as it is and release the terminal."""
        self._bar.stop()

    def hear(self, entry: JournalEntry) -> None:
        """Show an entry of the journal: a warning, a fallback, or progress."""
        if entry.kind in ("warning", "fallback"):
            self._console.print(f"{entry.kind}: {entry.where}: {entry.message}")
        if entry.kind != "progress":
            return
        figures = entry.figures
        if "block" in figures:
            self._show("blocks", f"{entry.message}  {figures['step']}", figures["block"], figures["blocks"])
        else:
            loss = f"  loss {figures['loss']:.4g}" if "loss" in figures else ""
            self._show(entry.message, entry.message + loss, figures["done"], figures["of"])

    def _show(self, task: str, text: str, count: int, of: int) -> None:
        self._bar.start()
        if task not in self._tasks:
            self._tasks[task] = self._bar.add_task(text, total=of)
        self._bar.update(self._tasks[task], description=text, completed=count)
        tenth = 10 * count // of
        if not self._console.is_terminal and (task, tenth) not in self._record:
            self._record.add((task, tenth))
            self._console.print(f"{text}  {count}/{of}")
