"""Tables of text: what a terminal prints, and what Python and notebooks show of a result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

SHOWN = 12
"""The most rows of a table in the `repr` of a result: a screen has two of them."""


class ResultTable(NamedTuple):
    """A table.

    Attributes:
        title: Text above it; may be empty.
        head: Names of the columns.
        rows: Cells of each row.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def without_empty_columns(self) -> ResultTable:
        """Remove the columns that have no text."""
        columns = [i for i in range(len(self.head)) if any(row[i] for row in self.rows)]
        head = tuple(self.head[i] for i in columns)
        return ResultTable(self.title, head, [tuple(row[i] for i in columns) for row in self.rows])


class Shown(ABC):
    """A result that Python shows as tables of at most `SHOWN` rows, and a notebook as HTML."""

    @abstractmethod
    def tables(self) -> Iterable[ResultTable]:
        """Return the tables, the most important first."""

    def __repr__(self) -> str:
        return "\n\n".join(map(_text, self.tables()))

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        return "\n".join(map(_html, self.tables()))


def megabytes(size_bytes: float) -> str:
    """Format a size in MB with three significant digits, from 1000 MB on with all: 0.0524, 9.41, 269, 4488."""
    size = size_bytes / 1e6
    digits = 2 - math.floor(math.log10(size)) if size > 0 else 0
    return f"{size:.{min(max(digits, 0), 6)}f}"


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a line for each row; all columns but the first are aligned to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *further in rows:
        cells = [cell.rjust(width) for cell, width in zip(further, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def records(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the rows of a table one below the other, a line for each cell that is not empty."""
    width = max(map(len, head[1:]), default=0)
    lines: list[str] = []
    for first, *further in rows:
        cells = [f"  {name.ljust(width)}  {cell}" for name, cell in zip(head[1:], further, strict=True) if cell]
        lines += [first, *cells]
    return lines


def _limited(table: ResultTable) -> tuple[Sequence[tuple[str, ...]], str]:
    """Return the rows that are shown, and a line that says how many are not."""
    more = len(table.rows) - SHOWN
    return table.rows[:SHOWN], f"... and {more} rows more" if more > 0 else ""


def _text(table: ResultTable) -> str:
    rows, more = _limited(table)
    return "\n".join(line for line in (table.title, *aligned([table.head, *rows]), more) if line)


def _html(table: ResultTable) -> str:
    rows, more = _limited(table)
    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    text = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return text + (f"<p>{escape(more)}</p>" if more else "")
