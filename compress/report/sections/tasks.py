"""Section: zero-shot tasks, with the confidence interval of each difference, and flips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.charts import Interval, IntervalChart
from compress.report.page.blocks import Items, PageBlock, Prose, TextTable, Tone
from compress.report.page.numbers import number, signed, with_error
from compress.report.sections.base import Section
from compress.report.verdict import SIGNIFICANT
from compress.results.measurements.tasks import TaskComparison, TasksResult, adjusted_p_values
from compress.results.result import RunResult

HEAD = ("task", "before", "after")


class TasksSection(Section):
    """The paired differences, and a table of scores; report.md has them in the table of size and quality."""

    title: ClassVar[str] = "Tasks"
    order: ClassVar[int] = 14

    def render(self, result: RunResult) -> str | None:
        return None

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        tasks: TasksResult | None = result.evaluations.get("tasks")
        if tasks is None:
            return []
        p_values = adjusted_p_values(tasks.scores)
        intervals = [
            interval(row, p_values.get((row.task, row.metric))) for row in tasks.scores if row.paired is not None
        ]
        template = "with the chat template" if tasks.chat_template else "without a chat template"
        text = (
            "Difference on the same items, compressed minus base, with its 95% interval. Gained and lost: items that "
            "only the compressed or only the base model answers right; p: of the exact McNemar test. Colors: p below "
            f"{SIGNIFICANT} after Holm's correction for the number of metrics. "
            f"lm-eval {tasks.lm_eval}, {template}."
        )
        failed = [f"{name} failed: {reason}" for name, reason in tasks.failed.items()]
        x_name = "difference of the metric"
        return [
            Prose(text),
            *([IntervalChart("Change of each task", intervals, x_name, "lower", "higher")] if intervals else []),
            *([TextTable(HEAD, [row_of(row) for row in tasks.scores])] if tasks.scores else []),
            *([Items(failed)] if failed else []),
        ]


def interval(row: TaskComparison, p_value: float | None) -> Interval:
    """Return the paired difference of a metric.

    Args:
        row: the metric of both models.
        p_value: of the difference, adjusted for the number of metrics; it decides the tone.
    """
    paired = row.paired
    assert paired is not None
    counts = "" if paired.p is None else f"{paired.gained} gained, {paired.lost} lost, p = {number(paired.p, 2)}"
    bounds = "" if paired.low is None or paired.high is None else signed(f" [{paired.low:+.3f}, {paired.high:+.3f}]")
    tone: Tone = "plain"
    if p_value is not None and p_value < SIGNIFICANT:
        tone = "good" if (paired.difference > 0) == row.higher_is_better else "bad"
    name = f"{row.task} {row.metric}"
    return Interval(
        name, paired.difference, paired.low, paired.high, signed(f"{paired.difference:+.3f}") + bounds, counts, tone
    )


def row_of(row: TaskComparison) -> tuple[str, ...]:
    """Return a row of `HEAD`."""
    items = f"{row.items} of {row.of}" if row.items < row.of else f"{row.items}"
    scores = with_error(row.base, row.base_stderr), with_error(row.compressed, row.compressed_stderr)
    return (f"{row.task} {row.metric}, {items} items", *scores)
