"""Section: size of the checkpoint, and the summary of every evaluator, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.evaluate import EVALUATORS
from compress.evaluate.base import SummaryRow
from compress.numerics.dtypes import DTYPES
from compress.report.page.blocks import Bars, Block, Details, Table, before_and_after
from compress.report.page.numbers import data_size, number
from compress.report.schema import Report
from compress.report.sections.base import MB, Section, table

HEAD = ("", "before", "after", "ratio")


class SizeAndQuality(Section):
    """A table with the rows of `rows`."""

    title: ClassVar[str] = "Size and quality"
    order: ClassVar[int] = 10

    def render(self, report: Report) -> str:
        return table(HEAD, rows(report))

    def blocks(self, report: Report) -> Sequence[Block]:
        size, bits = report.size, dense_bits(report)
        bytes_ = (size.dense_bytes, size.checkpoint_bytes)
        smaller = f"{bytes_[0] / bytes_[1]:.2f}× smaller"
        names = (data_size(bytes_[0]), data_size(bytes_[1]))
        widths = (float(bits), size.bits_per_weight)
        title = f"Bits per weight, {size.compressed_layers} layers"
        groups = [
            before_and_after("Checkpoint", smaller, bytes_, names),
            before_and_after(title, f"{bits / widths[1]:.2f}× smaller", widths, (f"{bits}", number(widths[1]))),
        ]
        return [Bars(groups), Details("All figures in one table", [Table(HEAD, rows(report))])]


def dense_bits(report: Report) -> int:
    """Bits of a stored weight before compression."""
    return 8 * DTYPES[report.reproduce.storage_dtype].itemsize


def rows(report: Report) -> list[SummaryRow]:
    """Rows (quantity, before, after, ratio): bytes, bits per weight, and those of every evaluator."""
    size = report.size
    dense = size.dense_bytes
    bits = dense_bits(report)
    found = [
        (
            "checkpoint, MB",
            f"{dense / MB:.1f}",
            f"{size.checkpoint_bytes / MB:.1f}",
            f"{dense / size.checkpoint_bytes:.2f}x smaller",
        ),
        (
            f"bits per weight, {size.compressed_layers} layers",
            f"{bits:.2f}",
            f"{size.bits_per_weight:.3f}",
            f"{bits / size.bits_per_weight:.2f}x smaller",
        ),
    ]
    for key, result in report.evaluations.items():
        if key in EVALUATORS and result is not None:
            found += EVALUATORS[key]().summary(result)
    return found
