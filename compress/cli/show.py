"""Print results of commands: lines and tables. Names and texts that come from files cannot command a terminal."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compress.recipe.tables import ResultTable, aligned, megabytes, records

if TYPE_CHECKING:
    from compress.pipeline.hardware import HardwarePlan
    from compress.pipeline.plan import Plan
    from compress.recipe.pages import PassPage

LONG = 500
"""The most rows of a table that `rich` draws; it takes 2 ms per row."""

PAGE = 100
"""The most characters of a line of text."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except new line and tab, changes of the direction of text, and halves of surrogate pairs."""


WORD = 20
"""The width from which a word, such as the name of a module, is folded on a narrow terminal."""
NUMBER = re.compile(r"[-+]?\d")
"""The start of a cell that holds a number."""


def printable(text: str) -> str:
    """Return a text with control characters, such as the escape of terminal commands, spelled as \\x1b."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def echo(text: str, err: bool = False, nl: bool = True) -> None:
    """Print a text with `printable` characters.

    Args:
        err: print on standard error.
        nl: end with a new line.
    """
    click.echo(printable(text), err=err, nl=nl)


def print_table(table: ResultTable) -> None:
    """Print a table; all columns but the first are aligned to the right.

    On a narrow terminal texts are folded between their words. Where that is not enough, each row is printed as a
    record, one line for each cell, so that no number is broken.
    """
    title, rows = printable(table.title), [tuple(map(printable, row)) for row in table.rows]
    columns = list(zip(table.head, *rows, strict=True))
    natural, least = _width(max(map(len, column)) for column in columns), _width(map(_least_width, columns))
    width = shutil.get_terminal_size((0, 24)).columns or max(natural, len(title))  # 0: a file or a pipe
    if least > width:
        echo("\n".join([*([title] if title else []), *records(table.head, rows)]))
    elif len(rows) > LONG:
        echo("\n".join([*([title] if title else []), *aligned([table.head, *rows])]))
    else:
        _print_boxed(ResultTable(title, table.head, rows), width)


def _width(columns: Iterable[int]) -> int:
    """Return the width of a table with lines around cells of some widths."""
    return sum(width + 3 for width in columns) + 1


def _least_width(column: tuple[str, ...]) -> int:
    """Return the width of the longest number of a column with its error, or of its longest word up to `WORD`."""
    words = (min(WORD, max(map(len, cell.split()), default=0)) for cell in column)
    return max(len(cell) if NUMBER.match(cell) else word for cell, word in zip(column, words, strict=True))


def _print_boxed(table: ResultTable, width: int) -> None:
    """Print a table with lines around its cells. Columns of texts become narrower until it fits the width."""
    from rich.console import Console
    from rich.table import Table as Boxed

    columns = list(zip(table.head, *table.rows, strict=True))
    widths, least = [max(map(len, column)) for column in columns], [_least_width(column) for column in columns]
    while _width(widths) > width:
        reducible = [i for i in range(len(columns)) if widths[i] > least[i]]
        widths[max(reducible, key=lambda i: widths[i])] -= 1
    if table.title:
        echo(table.title)
    boxed = Boxed()
    for i, name in enumerate(table.head):
        boxed.add_column(name, justify="left" if i == 0 else "right", width=widths[i], overflow="fold")
    for row in table.rows:
        boxed.add_row(*(_folded(cell, width) for cell, width in zip(row, widths, strict=True)))
    Console(markup=False, width=width).print(boxed)


def _folded(text: str, width: int) -> str:
    """Return a cell in lines of at most a width; a long name is divided after a dot or a slash, if it has one."""
    lines = []
    for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
        while len(line) > width:
            cut = max(line.rfind(mark, 0, width) for mark in "./") + 1 or width
            lines.append(line[:cut])
            line = line[cut:]
        lines.append(line)
    return "\n".join(lines)


def print_report(values: dict[str, Any], folder: Path) -> None:
    """Print the evidence of a run."""
    from compress.report.sections import checks, formats, journal, size_and_quality, time_and_memory
    from compress.results.result import RunResult

    report = RunResult.from_json(values)
    title = f"{report.model.source} -> {folder}"
    print_table(ResultTable(title, size_and_quality.HEAD, size_and_quality.rows(report)))
    print_table(ResultTable("", time_and_memory.HEAD, time_and_memory.rows(report)))
    if report.formats:
        print_table(ResultTable("", formats.HEAD, formats.rows(report)))
    if report.reading is not None:
        print_sentence(time_and_memory.disk_time(report.reading))
    for line in [*checks.lines(report), *journal.lines(report)]:
        print_sentence(line)
    echo(f"checkpoint sha256: {report.checkpoint_sha256}")
    for line in formats.digests(report):
        echo(line)
    if (folder / "report.html").exists():  # writing it may have failed
        echo(f"report: {folder / 'report.html'} and report.md, model card: {folder / 'README.md'}")


def print_plan(planned: Plan, all_modules: bool) -> None:
    """Print a plan, with a row for each kind of layer or for each layer."""
    head = ("module", "out x in", "passes", "stored as", "MB")
    rows = [
        (
            f"{group.name}",
            f"{group.shape[0]} x {group.shape[1]}",
            ", ".join(group.passes) or "unchanged",
            group.scheme.text,
            megabytes(group.size_bytes),
        )
        for group in (planned.layers if all_modules else planned.groups())
    ]
    if not all_modules:
        head = ("modules", "count", *head[1:])
        counts = [f"{group.count}" for group in planned.groups()]
        rows = [(name, count, *cells) for count, (name, *cells) in zip(counts, rows, strict=True)]
    print_table(ResultTable("", head, rows))
    for note in planned.notes:
        print_sentence(f"note: {note}")
    tensors, dense = megabytes(planned.checkpoint_bytes), megabytes(planned.dense_bytes)
    if planned.target_bytes is None:
        print_sentence(f"checkpoint: {tensors} MB of tensors ({dense} MB dense)")
    else:
        target = megabytes(planned.target_bytes)
        print_sentence(f"checkpoint: at most {target} MB ({dense} MB dense); the types above change within that size")
    for name, size in planned.formats.items():
        echo(f"converted to {name}: {megabytes(size)} MB of tensors, in the folder {name} inside")
    process_bytes = planned.process_bytes
    several = "" if process_bytes is None else f"; each of several processes {process_memory(process_bytes)}"
    print_sentence(f"memory: needs {process_memory(planned.memory_bytes)}{several}")
    for need in () if planned.fit is None else planned.fit.needs:
        print_sentence(f"{need.where}: {megabytes(need.size_bytes)} MB ({need.text})", "  ")
    print_sentence(time_of(planned))


def print_hardware_plan(planned: HardwarePlan) -> None:
    """Print a plan on a hardware: a row for each setting that fits, then the parts of the cheapest one."""
    rows = []
    for setting in planned.settings:
        seconds, inputs = setting.total_seconds, setting.fit.inputs_at_once
        device_hours = None if setting.device_seconds is None else setting.device_seconds / 3600
        rows.append(
            (
                f"{setting.processes}",
                f"{setting.fit.batch}",
                "all" if inputs is None else f"{inputs}",
                f"files, {megabytes(setting.file_bytes)} MB" if setting.file_bytes else "memory",
                gigabytes(setting.fit.peak_bytes + planned.libraries_bytes),
                gigabytes(setting.ram_bytes),
                "unknown" if seconds is None else in_words(seconds),
                "unknown" if device_hours is None else f"{device_hours:.3g}",
            )
        )
    head = ("devices", "batch", "inputs at once", "activations", "GB each", "GB of RAM", "time", "device-hours")
    print_table(ResultTable(f"predicted: {planned.model} on {planned.hardware.text}", head, rows))
    for processes, reason in planned.unfit.items():
        echo(f"{processes} devices do not fit: {reason}")
    for note in planned.notes:
        echo(f"note: {note}")
    cheapest = planned.cheapest
    echo(f"checkpoint: {gigabytes(planned.checkpoint_bytes)} GB of tensors ({gigabytes(planned.dense_bytes)} GB dense)")
    files = f", {gigabytes(cheapest.file_bytes)} GB of activations" if cheapest.file_bytes else ""
    echo(
        f"disk: {gigabytes(planned.disk_bytes)} GB (model {gigabytes(planned.dense_bytes)} GB, checkpoint "
        f"{gigabytes(planned.checkpoint_bytes)} GB{files})"
    )
    fastest = "" if planned.fastest is cheapest else f"; fastest: {planned.fastest.processes}"
    echo(f"cheapest: {cheapest.processes} of {planned.hardware.count} devices{fastest}")
    for need in cheapest.fit.needs:
        echo(f"  {need.where}: {megabytes(need.size_bytes)} MB ({need.text})")
    parts = "" if cheapest.seconds is None else ", ".join(f"{n} {in_words(s)}" for n, s in cheapest.seconds.items())
    echo(f"time: {parts or 'unknown'}" + "".join(f"; without {phase}" for phase in planned.unknown))
    echo(f"rates: {planned.rates}")


def gigabytes(size_bytes: float) -> str:
    """Return a size in 10^9 bytes, with three digits."""
    return f"{size_bytes / 1e9:.3g}" if size_bytes < 1e12 else f"{size_bytes / 1e9:.0f}"


def process_memory(tensor_bytes: int) -> str:
    """Return the memory of a process at its peak in words, with that of the libraries."""
    from compress.pipeline.fitting import LIBRARIES_BYTES

    total_gb, tensors = (tensor_bytes + LIBRARIES_BYTES) / 1e9, megabytes(tensor_bytes)
    return f"about {total_gb:.1f} GB ({tensors} MB of tensors, {megabytes(LIBRARIES_BYTES)} MB for Python and torch)"


def time_of(planned: Plan) -> str:
    """Return the predicted time in words."""
    timing = planned.timing
    if timing is None:
        return "time: not measured on this machine yet; --time runs the passes on one block and predicts it"
    parts = ", ".join(f"{name} {in_words(seconds)}" for name, seconds in timing.phases.items())
    total = f"about {in_words(timing.seconds)} on this machine ({parts})" if parts else "unknown"
    return f"time: {total}" + "".join(f"; without {phase}" if parts else f"; {phase}" for phase in timing.unknown)


def in_words(seconds: float) -> str:
    """Format seconds with a suitable unit."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def print_json(value: Any) -> None:
    """Print JSON."""
    echo(json.dumps(value, indent=2))


def print_pass(page: PassPage) -> None:
    """Print the page of a pass: documentation, order, paper, options with defaults and ranges, and measured rows."""
    from compress.recipe.measured import figure, measured, spelled

    echo(f"{page.name}\n")
    _print_wrapped(page.summary)
    for title, text in page.sections():
        if text:
            echo(f"\n{title.lower()}:")
            _print_text(text)
    echo(f"\nrecipe:\n  compress run {page.name} --model MODEL")
    if page.schemes:
        echo("\nschemes:")
        _print_wrapped(", ".join(page.schemes), "  ")
    echo("\noptions:")
    for option in page.options:
        default = "required" if option.default is None else option.default
        values = f" ({option.values})" if option.values else ""
        _print_wrapped(f"{option.name} = {default}{values}: {option.description}", "  ", "      ")
    for table, rows in page.measured:
        echo("")
        _print_wrapped(f"measured perplexity; {table.text}:")
        for row in rows:
            chain = ", ".join(map(spelled, row.passes))
            bits = f", {row.bits:g} bits" if row.bits else ""
            note = f" ({row.note})" if row.note else ""
            _print_wrapped(f"{chain}{bits}{note}", f"  {figure(row.perplexity):<7} ", " " * 10)
    if page.measured:
        echo("")
        _print_wrapped(f"{measured().protocol}; uncompressed: {measured().uncompressed}")


def print_items(items: Mapping[str, str]) -> None:
    """Print a line for each name with its text; on a terminal long texts are wrapped in their column."""
    indent = max(map(len, items)) + 2
    for name, text in items.items():
        _print_wrapped(text, f"{name:{indent}}", " " * indent, pipe=None)


def print_sentence(text: str, indent: str = "") -> None:
    """Print words as one line; on a terminal they are wrapped, and the further lines are indented."""
    _print_wrapped(text, indent, f"{indent}  ", pipe=None)


def _print_text(text: str) -> None:
    """Print paragraphs and lists, of which each item starts with '- '."""
    for i, paragraph in enumerate(text.split("\n\n")):
        if i:
            echo("")
        for item in re.split(r"\n(?=- )", paragraph):
            _print_wrapped(item, "  ", "    " if item.startswith("- ") else "  ")


def _print_wrapped(text: str, first: str = "", others: str = "", pipe: int | None = PAGE) -> None:
    """Print words in lines of at most the width of the terminal.

    Args:
        first: start of the first line.
        others: start of the other lines.
        pipe: most characters of a line where there is no terminal, and on wide ones; None: all words are one line.
    """
    terminal = shutil.get_terminal_size((0, 24)).columns
    width = min(terminal, PAGE) if terminal and pipe else terminal or pipe
    words = " ".join(text.split())
    if width is None:
        echo(first + words)
        return
    lines = textwrap.wrap(
        words, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
    echo("\n".join(lines))
