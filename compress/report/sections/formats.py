"""Section: the checkpoint in each format, if the recipe names several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.recipe.tables import megabytes
from compress.report.names import formats_in
from compress.report.page.blocks import Details, Items, PageBlock, TextTable
from compress.report.sections.base import Section, table
from compress.results.result import FormatResult, RunResult, Verification

HEAD = ("format", "folder", "MB", "layers", "read back by", "weights")
LAYERS = ("format", "layers", "count", "before", "after", "weight error")


class FormatsSection(Section):
    """A table with the rows of `rows`, and one with those of `rounded`."""

    title: ClassVar[str] = "Formats"
    order: ClassVar[int] = 27

    def render(self, result: RunResult) -> str | None:
        if not result.formats:
            return None
        parts, changed = [table(HEAD, rows(result))], rounded(result)
        if changed:
            parts += ["Layers that a format rounds:", table(LAYERS, changed)]
        return "\n\n".join([*parts, "\n".join(f"- {line}" for line in digests(result))])

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        if not result.formats:
            return []
        changed = rounded(result)
        details = [Details("Layers that a format rounds", [TextTable(LAYERS, changed)])] if changed else []
        return [TextTable(HEAD, rows(result)), *details, Items(digests(result))]


def rows(result: RunResult) -> list[tuple[str, ...]]:
    """List a row for each format, the one of the output folder first."""
    first = formats_in(result.reproduce.recipe)[0]
    size = megabytes(result.size.checkpoint_bytes)
    head = (first, ".", size, f"{result.verified.layers}", _readers(result.verified), "as computed")
    return [head, *(_row(name, written) for name, written in result.formats.items())]


def rounded(result: RunResult) -> list[tuple[str, ...]]:
    """List a row for each kind of layer whose weights differ from those of the first format."""
    return [
        (name, row.name, f"{row.count}", row.before, row.after, f"{row.error:.3e}")
        for name, written in result.formats.items()
        for row in written.rounded
    ]


def digests(result: RunResult) -> list[str]:
    """List the sha256 of the checkpoint in each further format."""
    formats = result.formats.values()
    return [f"sha256 of the checkpoint in {written.folder}: {written.checkpoint_sha256}" for written in formats]


def _row(name: str, written: FormatResult) -> tuple[str, ...]:
    size, layers = megabytes(written.checkpoint_bytes), f"{written.verified.layers}"
    return (name, written.folder, size, layers, _readers(written.verified), _weights(written))


def _readers(verified: Verification) -> str:
    return "compress" if verified.transformers is None else "compress, transformers"


def _weights(written: FormatResult) -> str:
    """Describe how the weights differ from those of the first format."""
    if not written.rounded:
        return "lossless"
    codes = [row for row in written.rounded if row.before != row.after]
    scales = [row for row in written.rounded if row.before == row.after]
    texts = [f"{row.name} rounded to {row.after} ({row.error:.1e})" for row in codes]
    if scales:
        count, largest = sum(row.count for row in scales), max(row.error for row in scales)
        texts.append(f"scales of {count} layers rounded ({largest:.1e})")
    return "; ".join(texts)
