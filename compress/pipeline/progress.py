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
        shown.complete()
    finally:
        journal.listeners.remove(shown.hear)
        shown.stop()


class Waiting:
    """A context in which a terminal shows that a command works; elsewhere only counts are shown.

    Args:
        text: What the command does, such as 'opening model.gguf'.
        console: By default standard error.
    """

    def __init__(self, text: str, console: Console | None = None) -> None:
        console = console or Console(stderr=True, markup=False, force_jupyter=False)
        self._shown: ProgressDisplay | None = ProgressDisplay(console)
        self._text = text

    def __enter__(self) -> Waiting:
        if self._shown is not None:
            self._shown.hear(JournalEntry("progress", "", self._text))
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def count(self, done: int, of: int) -> None:
        """Show the number of finished steps and of all; it replaces the text without a count."""
        if self._shown is not None:
            self._shown.hear(JournalEntry("progress", "", self._text, {"done": done, "of": of}))

    def end(self) -> None:
        """Remove the text without a count, and leave a count as it is; the context may end later."""
        if self._shown is not None:
            self._shown.end_stage()
            self._shown.stop()
            self._shown = None


class ProgressDisplay:
    """A progress bar with block, pass and time left; without a terminal, a line for every tenth.

    A stage, which has no count, is shown on a terminal until the next entry.
    """

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
        self._counts: dict[str, tuple[str, int, int]] = {}
        self._record: set[tuple[str, int]] = set()
        self._stage: TaskID | None = None

    def stop(self) -> None:
        """Leave the bar as it is and release the terminal."""
        self._bar.stop()

    def complete(self) -> None:
        """Show counts as complete whose last step has begun."""
        self.end_stage()
        for task in self._counts:
            self._complete(task)

    def hear(self, entry: JournalEntry) -> None:
        """Show an entry of the journal: a warning, a fallback, or progress."""
        if entry.label == "warning":
            self._print(f"{entry.label}: {entry.place}: {entry.message}")
        if entry.kind != "progress":
            return
        self.end_stage()
        figures = entry.figures
        if entry.where == "evaluate":
            self._complete("blocks")
        if "block" in figures:
            self._show("blocks", f"{entry.message}  {figures['step']}", figures["block"], figures["blocks"])
        elif "of" in figures:
            loss = f"  loss {figures['loss']:.4g}" if "loss" in figures else ""
            self._show(entry.message, entry.message + loss, figures["done"], figures["of"])
        else:
            self._begin_stage(entry.message)

    def end_stage(self) -> None:
        """Remove the stage that is shown."""
        if self._stage is not None:
            self._bar.remove_task(self._stage)
            self._stage = None

    def _begin_stage(self, text: str) -> None:
        self._bar.start()
        self._complete("blocks")
        self._stage = self._bar.add_task(text, total=None)

    def _complete(self, task: str) -> None:
        """Show a count as complete if its last step has begun; a training that ended early has more."""
        text, count, of = self._counts.get(task, ("", 0, 0))
        if count == of - 1:
            self._show(task, text, of, of)

    def _show(self, task: str, text: str, count: int, of: int) -> None:
        self._bar.start()
        if task not in self._tasks:
            self._tasks[task] = self._bar.add_task(text, total=of)
        self._bar.update(self._tasks[task], description=text, completed=count)
        self._counts[task] = text, count, of
        tenth = 10 * count // of
        if not self._console.is_terminal and (task, tenth) not in self._record:
            self._record.add((task, tenth))
            self._print(f"{text}  {count}/{of}")

    def _print(self, text: str) -> None:
        """Print a line, which a pipe does not wrap."""
        self._console.print(text, soft_wrap=not self._console.is_terminal)
