"""Section: size of the checkpoint, and the summary of every evaluator, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.recipe.tables import megabytes
from compress.report.page.blocks import Bars, Details, PageBlock, TextTable, before_and_after
from compress.report.page.numbers import data_size, number
from compress.report.sections.base import Section, table
from compress.report.verdict import storage_bits, x_smaller
from compress.results.measurements import MEASUREMENTS
from compress.results.measurements.base import SummaryRow
from compress.results.result import RunResult

HEAD = ("", "before", "after", "change")


class SizeAndQualitySection(Section):
    """A table with the rows of `rows`."""

    title: ClassVar[str] = "Size and quality"
    order: ClassVar[int] = 10

    def render(self, result: RunResult) -> str:
        return table(HEAD, rows(result))

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        size, dense_bits = result.size, storage_bits(result)
        sizes = size.dense_bytes, size.checkpoint_bytes
        bits = float(dense_bits), size.bits_per_weight
        groups = [
            before_and_after(
                "Checkpoint", f"{sizes[0] / sizes[1]:.2f}× smaller", sizes, (data_size(sizes[0]), data_size(sizes[1]))
            ),
            before_and_after(
                f"Bits per weight, {size.compressed_layers} layers",
                f"{bits[0] / bits[1]:.2f}× smaller",
                bits,
                (f"{dense_bits}", number(bits[1])),
            ),
        ]
        return [Bars(groups), Details("All figures in one table", [TextTable(HEAD, rows(result))])]


def rows(result: RunResult) -> list[SummaryRow]:
    """List rows (quantity, before, after, ratio): bytes, bits per weight, and those of every evaluator."""
    size, bits = result.size, storage_bits(result)
    summary = [
        (
            "checkpoint, MB",
            megabytes(size.dense_bytes),
            megabytes(size.checkpoint_bytes),
            x_smaller(size.dense_bytes / size.checkpoint_bytes),
        ),
        (
            f"bits per weight, {size.compressed_layers} layers",
            f"{bits:.2f}",
            f"{size.bits_per_weight:.3f}",
            f"{bits / size.bits_per_weight:.2f}x smaller",
        ),
    ]
    if size.other_source_bytes is not None:
        ratio = x_smaller(size.other_source_bytes / size.checkpoint_bytes)
        sizes = megabytes(size.other_source_bytes), megabytes(size.checkpoint_bytes)
        summary.insert(1, ("checkpoint against the source file, MB", *sizes, ratio))
    for key, value in result.evaluations.items():
        if key in MEASUREMENTS and value is not None:
            summary += MEASUREMENTS[key].summary(value)
    return summary
