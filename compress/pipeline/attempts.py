"""The runs of a sweep, each as plain values that another process can run, and what became known of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console

from compress.errors import CompressError, QualityError, one_line
from compress.models.computation import device_of
from compress.passes.contract.journal import Journal
from compress.pipeline.progress import shown_progress
from compress.pipeline.run import run
from compress.recipe.schema import Recipe
from compress.recipe.settings import Setting


@dataclass(frozen=True)
class RecipeText:
    """A recipe before its settings apply.

    Attributes:
        text: YAML text.
        name: Its name in errors.
        folder: Folder to which its paths are relative; None: the current one.
    """

    text: str
    name: str
    folder: Path | None

    def read(self, settings: Sequence[Setting] = ()) -> Recipe:
        """Read the recipe with settings. Raises the errors of `Recipe.from_text`."""
        return Recipe.from_text(self.text, self.name, settings, self.folder)


@dataclass(frozen=True)
class RunTask:
    """A run of a sweep.

    Attributes:
        name: Name of the combination, in messages.
        recipe: The recipe of the sweep.
        settings: All settings of this run.
        folder: Its output folder.
        log: File that receives its progress, and the traceback of an error.
        needed_bytes: Memory that the run needs, libraries included.
        memory_bytes: Limit of memory that the user states; None for none.
        device: Device of computation, as the recipe states it.
        has_limit: Whether an executor may limit the memory of the run to `needed_bytes` or more.
        overwrite: Whether to replace another run in the folder.
    """

    name: str
    recipe: RecipeText
    settings: tuple[Setting, ...]
    folder: Path
    log: Path
    needed_bytes: int
    memory_bytes: int | None = None
    device: str = "auto"
    has_limit: bool = True
    overwrite: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the run computes on a GPU of this machine."""
        return self.device != "cpu" and device_of("auto").type == "cuda"


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        name: Name of the combination.
        seconds: Wall time.
        error: Its error in one line; None if there is none.
        complete: Whether the checkpoint and its report are complete. A run below its limits of quality is.
    """

    name: str
    seconds: float
    error: str | None = None
    complete: bool = True


class Executor(Protocol):
    """Runs the tasks of a sweep."""

    def outcomes(self, tasks: Sequence[RunTask]) -> Generator[Outcome, None, None]:
        """Run all tasks; yield each outcome as soon as it is known, in any order.

        Raises:
            ShortageError: before any run, for a task that needs more than there is.
        """
        ...


class Serial:
    """Run tasks one after the other in this process."""

    def outcomes(self, tasks: Sequence[RunTask]) -> Generator[Outcome, None, None]:
        for task in tasks:
            yield attempt(task, task.memory_bytes)


def attempt(task: RunTask, memory_bytes: int | None, threads: int | None = None) -> Outcome:
    """Run a task. An error of the run is part of the outcome.

    Args:
        task: The task.
        memory_bytes: Limit of memory of this process; None for none.
        threads: Threads of torch in this process; None leaves them as they are.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    started, journal = time.monotonic(), Journal()
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with task.log.open("a", encoding="utf-8") as file:
        console = Console(file=file, markup=False, force_jupyter=False, force_terminal=False, width=200)
        try:
            recipe = task.recipe.read(task.settings)
            with shown_progress(journal, console):
                run(recipe, task.folder, task.overwrite, journal, progress=False, memory=memory_bytes)
        except Exception as error:
            console.print(traceback.format_exc(), soft_wrap=True)
            return Outcome(task.name, time.monotonic() - started, in_one_line(error), isinstance(error, QualityError))
    return Outcome(task.name, time.monotonic() - started)


def in_one_line(error: Exception) -> str:
    """Return the message of an error in one line; of one that is a bug, its type too."""
    if isinstance(error, CompressError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {one_line(error)}"
