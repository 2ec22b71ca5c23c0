"""Section: zero-shot tasks, with the confidence interval of each difference, and flips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.evaluate.tasks import TaskComparison, TasksResult
from compress.report.page.blocks import Block, Items, Prose, Table, Tone
from compress.report.page.charts import Interval, Intervals
from compress.report.page.numbers import number, signed, with_error
from compress.report.schema import Report
from compress.report.sections.base import Section
from compress.report.verdict import SIGNIFICANT

HEAD = ("task", "before", "after")


class Tasks(Section):
    """The paired differences, and a table of scores; report.md has them in the table of size and quality."""

    title: ClassVar[str] = "Tasks"
    order: ClassVar[int] = 14

    def render(self, report: Report) -> str | None:
        return None

    def blocks(self, report: Report) -> Sequence[Block]:
        found: TasksResult | None = report.evaluations.get("tasks")
        if found is None:
            return []
        shown = [interval(row) for row in found.scores if row.paired is not None]
        facts = "with the chat template" if found.chat_template else "without a chat template"
        text = (
            "Difference on the same items, compressed minus base, with its 95% interval. Gained and lost: items that "
            "only the compressed or only the base model answers right; p: of the exact McNemar test. "
            f"lm-eval {found.lm_eval}, {facts}."
        )
        failed = [f"{name} failed: {why}" for name, why in found.failed.items()]
        return [
            Prose(text),
            *([Intervals(shown, "lower", "higher")] if shown else []),
            *([Table(HEAD, [row_of(row) for row in found.scores])] if found.scores else []),
            *([Items(failed)] if failed else []),
        ]


def interval(row: TaskComparison) -> Interval:
    """The paired difference of a metric; its tone is that of a decided one."""
    paired = row.paired
    assert paired is not None
    counts = "" if paired.p is None else f"{paired.gained} gained, {paired.lost} lost, p = {number(paired.p, 2)}"
    bounds = "" if paired.low is None or paired.high is None else signed(f" [{paired.low:+.3f}, {paired.high:+.3f}]")
    tone: Tone = "plain"
    if paired.p is not None and paired.p < SIGNIFICANT:
        tone = "good" if (paired.difference > 0) == row.higher_is_better else "bad"
    name = f"{row.task} {row.metric}"
    return Interval(
        name, paired.difference, paired.low, paired.high, signed(f"{paired.difference:+.3f}") + bounds, counts, tone
    )


def row_of(row: TaskComparison) -> tuple[str, ...]:
    """A row of `HEAD`."""
    items = f"{row.items} of {row.of}" if row.items < row.of else f"{row.items}"
    scores = with_error(row.base, row.base_stderr), with_error(row.compressed, row.compressed_stderr)
    return (f"{row.task} {row.metric}, {items} items", *scores)
