"""The command line: parse, call, print. No logic."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
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
from rich.table import Table

from compress.errors import CompressError
from compress.version import __version__

INTERRUPTED = 130


class _Group(click.Group):
    """Print errors as one line and exit with their code; --debug at any position shows the traceback."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        plain = [arg for arg in given if arg != "--debug"]
        debug = len(plain) < len(given)
        try:
            code = super().main(plain, *rest, **{**kwargs, "standalone_mode": False})
        except CompressError as error:
            _fail(str(error), error.exit_code, debug)
        except click.exceptions.Abort:
            _fail("interrupted; run the same command again to resume", INTERRUPTED, debug)
        except KeyboardInterrupt:
            _fail("interrupted; run the same command again to resume", INTERRUPTED, debug)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except OSError as error:
            _fail(str(error), 1, debug)
        except Exception as error:
            name = f"{type(error).__name__}: {error}".removesuffix(": ")
            hint = "run the same command with --debug for the traceback, and report it as a bug with the recipe"
            _fail(f"unexpected {name}; {hint}", 1, debug)
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int, debug: bool) -> NoReturn:
    """Print one line, or the traceback with --debug, to standard error and exit."""
    click.echo(traceback.format_exc() if debug else f"error: {' '.join(message.split())}", err=True)
    sys.exit(code)


@click.group(cls=_Group)
@click.version_option(__version__, prog_name="compress")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Make language models smaller and faster by chaining small passes."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


RECIPE = click.argument("recipe", type=click.Path(path_type=Path))
MODEL = click.option("--model", help="Model to use instead of the recipe's: hub id, local folder or .gguf file.")


def _read(recipe: Path, model: str | None) -> Any:
    from compress.recipe.schema import Recipe  # torch takes seconds to import; --help does not need it

    found = Recipe.from_yaml(recipe)
    return found if model is None else found.model_copy(update={"model": model})


@main.command()
@RECIPE
@MODEL
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Output folder; default: out/NAME, with the recipe's name."
)
@click.option("--overwrite", is_flag=True, help="Replace a different run in the output folder.")
def run(recipe: Path, model: str | None, out: Path | None, overwrite: bool) -> None:
    """Compress the model of RECIPE, verify and evaluate the checkpoint. Resumes an interrupted run."""
    asked = _read(recipe, model)
    from compress.api.journal import Journal
    from compress.pipeline.run import run as run_recipe

    console, journal = Console(stderr=True, markup=False), Journal()
    folder = out or Path("out") / recipe.stem
    with _Interrupt() as interrupt, _Bar(console) as bar:
        journal.listeners += [interrupt, bar]
        result = run_recipe(asked, folder, overwrite, journal)
    if result.report:
        _print_report(result.report, folder)


@main.command()
@RECIPE
@MODEL
def plan(recipe: Path, model: str | None) -> None:
    """Show the effect of RECIPE on every module, the size of the checkpoint and the peak memory."""
    asked = _read(recipe, model)
    from compress.pipeline.plan import plan as make_plan

    planned = make_plan(asked)
    rows = [
        (layer.name, f"{layer.shape[0]} x {layer.shape[1]}", ", ".join(layer.passes) or "unchanged",
         layer.scheme.text,
         f"{layer.size_bytes}")
        for layer in planned.layers
    ]  # fmt: skip
    _print_table("", ("module", "out x in", "passes", "stored as", "bytes"), rows)
    for note in planned.notes:
        click.echo(f"note: {note}")
    click.echo(f"checkpoint: {planned.checkpoint_bytes} bytes of tensors ({planned.dense_bytes} dense)")
    click.echo(f"memory: about {planned.memory_bytes / 1e6:.0f} MB of tensors at the peak, without libraries")


@main.command("eval")
@click.argument("model")
@click.option(
    "--text",
    multiple=True,
    default=("embedded",),
    help="Text source: embedded, wikitext, or a .txt, .jsonl or .npy file.",
)
@click.option("--windows", type=click.IntRange(min=1), default=16, help="Number of windows per text.")
@click.option("--length", type=click.IntRange(min=2), default=512, help="Tokens per window.")
@click.option("--dtype", default="auto", help="Dtype of computation.")
def evaluate(model: str, text: tuple[str, ...], windows: int, length: int, dtype: str) -> None:
    """Measure the perplexity of MODEL, a compressed checkpoint or any other model."""
    from compress.evaluate.perplexity import evaluate_texts

    found = evaluate_texts(model, text, windows, length, dtype)
    rows = [
        (name, p.of, f"{p.perplexity:.4f}", f"{p.loss:.5f}", str(p.tokens), f"{p.seconds:.1f}")
        for name, p in found.items()
    ]
    _print_table(model, ("text", "predicted", "perplexity", "loss", "tokens", "seconds"), rows)


@main.command()
@click.option("--plugin", multiple=True, help="Python file with a pass; it is executed.")
def passes(plugin: tuple[str, ...]) -> None:
    """List the passes with their options."""
    from compress.recipe.plugins import available

    for key, step in available(plugin).items():
        click.echo(f"{key}: {(step.__doc__ or '').strip().splitlines()[0]}\n    {step.paper}")
        for name, option in step.model_fields.items():
            click.echo(f"    {name} = {option.default!r}: {option.description}")


def _print_report(values: dict[str, Any], folder: Path) -> None:
    from compress.report.schema import Report
    from compress.report.sections import checks, journal, size_and_quality, time_and_memory

    report = Report.from_json(values)
    _print_table(f"{report.model.source} -> {folder}", size_and_quality.HEAD, size_and_quality.rows(report))
    _print_table("", time_and_memory.HEAD, time_and_memory.rows(report))
    for line in [*checks.lines(report), *journal.lines(report)]:
        click.echo(line)
    click.echo(f"checkpoint sha256: {report.checkpoint_sha256}")
    click.echo(f"report: {folder / 'report.md'}")


def _print_table(title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    shown = Table(title=title or None, title_justify="left")
    for i, name in enumerate(head):
        shown.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    Console(markup=False).print(shown)


class _Interrupt:
    """Raise KeyboardInterrupt on SIGINT, and again at the run's next journal entry.

    A library may swallow an exception that is raised in its callback. The flag keeps the request to stop.
    """

    def __init__(self) -> None:
        self._pressed = False

    def __enter__(self) -> Callable[[Any], None]:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self._hear

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, *_: object) -> None:
        self._pressed = True
        raise KeyboardInterrupt

    def _hear(self, entry: Any) -> None:
        if self._pressed:
            raise KeyboardInterrupt


class _Bar:
    """A progress bar with block, pass and time left; without a terminal, a line for every tenth."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}
        self._record: set[tuple[str, int]] = set()

    def __enter__(self) -> Callable[[Any], None]:
        return self._hear

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _hear(self, entry: Any) -> None:
        if entry.kind == "fallback":
            self._console.print(f"{entry.kind}: {entry.where}: {entry.message}")
        if entry.kind != "progress":
            return
        figures = entry.figures
        if "block" in figures:
            self._show("blocks", f"{entry.message}  {figures['step']}", figures["block"], figures["blocks"])
        else:
            loss = f"  loss {figures['loss']:.4g}" if "loss" in figures else ""
            self._show(entry.message, entry.message + loss, figures["done"], figures["of"])

    def _show(self, task: str, text: str, done: int, of: int) -> None:
        self._bar.start()  # only here: with several processes only rank 0 has progress to show
        if task not in self._tasks:
            self._tasks[task] = self._bar.add_task(text, total=of)
        self._bar.update(self._tasks[task], description=text, completed=done)
        tenth = 10 * done // of
        if not self._console.is_terminal and (task, tenth) not in self._record:
            self._record.add((task, tenth))
            self._console.print(f"{text}  {done}/{of}")
