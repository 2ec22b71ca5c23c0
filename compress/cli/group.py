"""The group of all commands: errors in one line with their exit codes, --debug, and interrupts."""

from __future__ import annotations

import atexit
import gc
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import click

from compress.cli.show import echo
from compress.errors import CompressError, ProcessError, SeveralErrors, Terminated

INTERRUPTED = 130
AGAIN = "interrupted; run the same command again to resume"
EXIT_CODES = {
    0: "done",
    1: "the run failed: NaN, a full disk, a checkpoint that does not read back, a failed task, or a bug",
    2: "a mistake in the input: an option, a recipe, a model, a text, or an output folder",
    3: "the measured quality is below a limit of fail_if; what was made and measured is complete",
    INTERRUPTED: AGAIN,
}
"""Exit codes of all commands."""


class Task(NamedTuple):
    """Commands that serve one task, and an example of one of them."""

    commands: tuple[str, ...]
    example: str


TASKS = {
    "Compress a model": Task(
        ("quantize", "prune", "distill", "run", "sweep"), "compress quantize MODEL --scheme W4A16"
    ),
    "Write a recipe": Task(
        ("init", "plan", "recipes", "schemes", "passes", "sensitivity", "imatrix"),
        'compress init MODEL --target "4 bits" -o recipe.yaml',
    ),
    "Measure": Task(("eval", "compare", "bench", "roofline"), "compress eval out/small --base MODEL"),
    "Use a result": Task(
        ("generate", "export", "inspect", "report"), "compress export out/small --format gguf -o out/gguf"
    ),
    "Set up": Task(("completion",), "compress completion bash"),
}
"""The commands by the task that they serve."""


class ErrorGroup(click.Group):
    """Print errors as one line each and exit with their code; --debug at any position shows the traceback."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each task, and an example."""
        width = max(map(len, self.commands))
        for title, task in TASKS.items():
            with formatter.section(title):
                rows = [
                    (name.ljust(width), self.commands[name].get_short_help_str(limit=200)) for name in task.commands
                ]
                formatter.write_dl(rows)
                formatter.write_text(f"\b\nExample: {task.example}")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes."""
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, text in EXIT_CODES.items()])

    def main(self, args: Sequence[str] | None = None, *positional: Any, **kwargs: Any) -> Any:
        """Run the command that the arguments name, and exit."""
        arguments = list(sys.argv[1:] if args is None else args)
        plain = [arg for arg in arguments if arg != "--debug"]
        debug = len(plain) < len(arguments)
        try:
            code = super().main(plain, *positional, **{**kwargs, "standalone_mode": False})
        except SeveralErrors as error:
            _fail([str(problem) for problem in error.errors], error.exit_code, debug)
        except ProcessError as error:
            if error.told and not debug:
                sys.exit(error.exit_code)
            _fail([str(error)], error.exit_code, debug)
        except (CompressError, Terminated) as error:
            _fail([str(error)], error.exit_code, debug)
        except (click.exceptions.Abort, KeyboardInterrupt):
            _fail([AGAIN], INTERRUPTED, debug)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except OSError as error:
            _fail([str(error)], 1, debug)
        except Exception as error:
            from compress.recipe.plugins import place_of_bug  # slow: imports torch, which --help does not need

            name, place = f"{type(error).__name__}: {error}".removesuffix(": "), place_of_bug(error)
            if place is not None:
                hint = "correct this pass, which is not one of compress; --debug shows more"
                _fail([f"{place}: {name}; {hint}"], 1, debug)
            hint = "run the same command with --debug for the traceback, and report it as a bug with the recipe"
            _fail([f"unexpected {name}; {hint}"], 1, debug)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(messages: list[str], code: int, debug: bool) -> NoReturn:
    """Print a line for each message, or the traceback with --debug, to standard error and exit."""
    echo(traceback.format_exc() if debug else "\n".join(f"error: {' '.join(m.split())}" for m in messages), err=True)
    sys.exit(code)


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection during the import of large packages, where it takes an eighth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()  # later collections do not look through the imported modules
        atexit.register(_collect_at_exit)


def _collect_at_exit() -> None:
    """Thaw all objects before exit: triton, which torch imports if installed, reports every object that is left."""
    if "triton" in sys.modules:
        gc.unfreeze()


TERMINATED = "terminated, as by a launcher of which another process ended; run the same command again to resume"


class Interrupt:
    """Raise KeyboardInterrupt on SIGINT and again at the next journal entry of the run; raise Terminated on SIGTERM.

    A library may swallow an exception that is raised in its callback; the flag keeps the request to stop. The context
    yields the listener for the journal.
    """

    def __init__(self) -> None:
        self._pressed = False

    def __enter__(self) -> Callable[[Any], None]:
        self._before = signal.signal(signal.SIGINT, self._press)
        self._terminated = signal.signal(signal.SIGTERM, self._end)
        return self._hear

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        signal.signal(signal.SIGTERM, self._terminated)

    def _press(self, *_: object) -> None:
        self._pressed = True
        raise KeyboardInterrupt

    def _end(self, *_: object) -> None:
        raise Terminated(TERMINATED)

    def _hear(self, entry: Any) -> None:
        if self._pressed:
            raise KeyboardInterrupt
