"""Scores of tasks, and both models compared on the same items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from compress.numerics.statistics import holm
from compress.results.measurements.base import Measurement, Record, SummaryRow, plus_minus


class Metric(Record):
    """A metric of one model on one task.

    Attributes:
        value: The metric.
        stderr: Its standard error over items.
        higher_is_better: Whether a larger value is better.
        values: The value of each item; None if items have no value.
    """

    value: float
    stderr: float | None
    higher_is_better: bool
    values: list[float] | None = None


class TaskScore(Record):
    """The metrics of one model on one task.

    Attributes:
        task: Its name.
        version: Its version.
        fewshot: Number of worked examples in each prompt.
        items: Number of evaluated items.
        of: Number of all items.
        seconds: Wall time.
        metrics: By name.
    """

    task: str
    version: str
    fewshot: int
    items: int
    of: int
    seconds: float
    metrics: dict[str, Metric]


class Pairing(Record):
    """Two models on the same items.

    Attributes:
        difference: Mean difference, compressed minus base.
        stderr: Its standard error.
        low: Lower end of its 95% interval.
        high: Upper end of its 95% interval.
        gained: Items that only the compressed model answers right; None for metrics that are not right or wrong.
        lost: Items that only the base model answers right; None as above.
        p: p-value of the exact McNemar test; None as above.
    """

    difference: float
    stderr: float | None
    low: float | None
    high: float | None
    gained: int | None = None
    lost: int | None = None
    p: float | None = None


class TaskComparison(Record):
    """A metric of both models on one task; `paired` is None if items have no values or differ in number."""

    task: str
    metric: str
    items: int
    of: int
    fewshot: int
    higher_is_better: bool
    base: float
    base_stderr: float | None
    compressed: float
    compressed_stderr: float | None
    paired: Pairing | None


class TasksResult(Record):
    """The metrics of all tasks, and the reason for each task that failed."""

    scores: list[TaskComparison]
    failed: dict[str, str]
    chat_template: bool
    limit: int | None
    seed: int
    lm_eval: str


def adjusted_p_values(rows: Sequence[TaskComparison]) -> dict[tuple[str, str], float]:
    """Return the p-value of each paired metric that has one, by (task, metric), adjusted for their number (Holm)."""
    p_values = {
        (row.task, row.metric): row.paired.p for row in rows if row.paired is not None and row.paired.p is not None
    }
    return dict(zip(p_values, holm(list(p_values.values())), strict=True))


def change_of(row: TaskComparison) -> str:
    """Describe the difference with its interval, flips and p-value."""
    paired = row.paired
    if paired is None:
        return f"{row.compressed - row.base:+.4f}"
    interval = "" if paired.low is None or paired.high is None else f" [{paired.low:+.4f}, {paired.high:+.4f}]"
    counts = "" if paired.p is None else f", +{paired.gained} -{paired.lost}, p {paired.p:.2g}"
    return f"{paired.difference:+.4f}{interval}{counts}"


def metrics_in(scores: Iterable[TaskScore]) -> Iterator[tuple[TaskScore, str, Metric]]:
    """Yield (score, name, metric) of all metrics."""
    for score in scores:
        for name, metric in score.metrics.items():
            yield score, name, metric


class TasksMeasurement(Measurement):
    """The metrics of both models on tasks."""

    value_type: ClassVar[Any] = TasksResult

    @classmethod
    def summary(cls, value: TasksResult) -> list[SummaryRow]:
        return [
            (
                f"{row.task} {row.metric} ({row.items} items)",
                plus_minus(row.base, row.base_stderr, ".4f"),
                plus_minus(row.compressed, row.compressed_stderr, ".4f"),
                change_of(row),
            )
            for row in value.scores
        ]
