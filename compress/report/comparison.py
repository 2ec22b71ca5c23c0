"""Tables of the models that `compress eval` measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from compress.evaluate.agreement import MEASURE_WORDS
from compress.evaluate.base import plus_minus
from compress.evaluate.generation import GenerationResult
from compress.evaluate.result import Comparison
from compress.evaluate.tasks import TasksResult, change_of, metrics_in

TEXT_HEAD = ("model", "text", "predicted", "perplexity", "loss ± se", "bits per byte", "loss - base", "KL", "top-1")
TASK_HEAD = ("model", "task", "metric", "items", "value ± se", "against the base: difference [95%], flips, McNemar p")
AGREEMENT_HEAD = ("model", "text", "agreement with the base", "value ± se", "if equal")
ANSWER_HEAD = ("model", "tokens before they differ", "answers that end", "repeated 4-grams")

Rows = list[tuple[str, ...]]


def tables(comparison: Comparison) -> Iterator[tuple[tuple[str, ...], Rows]]:
    """Yield (head, rows) of each table that has rows, without empty columns."""
    for head, rows in (
        (TEXT_HEAD, text_rows(comparison)),
        (AGREEMENT_HEAD, agreement_rows(comparison)),
        (TASK_HEAD, task_rows(comparison)),
        (ANSWER_HEAD, answer_rows(comparison)),
    ):
        table = without_empty_columns(head, rows)
        if table[1]:
            yield table


def without_empty_columns(head: Sequence[str], rows: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], Rows]:
    """Remove the columns of a table that have no text."""
    rows = list(rows)
    columns = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return tuple(head[i] for i in columns), [tuple(row[i] for i in columns) for row in rows]


def text_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield rows of `TEXT_HEAD`."""
    for model in comparison.models:
        for text in model.texts:
            score, divergence, change = text.compressed, text.divergence, text.difference
            bits = score.bits_per_byte
            yield (
                comparison.labels[model.source],
                text.text,
                score.of,
                f"{score.perplexity:.4f}",
                plus_minus(score.loss, score.stderr, ".5f"),
                "" if bits is None else plus_minus(bits, score.bits_stderr, ".4f"),
                "" if change is None else plus_minus(change.loss, change.stderr, "+.5f"),
                "" if divergence is None else plus_minus(divergence.mean, divergence.stderr, ".5f"),
                "" if divergence is None else f"{divergence.agreement:.2%}",
            )


def agreement_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield rows of `AGREEMENT_HEAD`."""
    for model in comparison.models:
        for text in model.agreements:
            for name, measure in text.measures.items():
                words = MEASURE_WORDS[name]
                label = comparison.labels[model.source]
                yield label, text.text, words.name, words.value_text(measure), words.perfect


def task_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield rows of `TASK_HEAD`."""
    for model in comparison.models:
        tasks: TasksResult | None = model.evaluations.get("tasks")
        row_by_metric = {} if tasks is None else {(row.task, row.metric): row for row in tasks.scores}
        for score, name, metric in metrics_in(model.items.values()):
            row = row_by_metric.get((score.task, name))
            value = plus_minus(metric.value, metric.stderr, ".4f")
            change = "" if row is None else change_of(row)
            label = comparison.labels[model.source]
            yield label, score.task, name, f"{score.items} of {score.of}", value, change


def answer_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield rows of `ANSWER_HEAD`."""
    for model in comparison.models:
        result: GenerationResult | None = model.evaluations.get("generation")
        if result is not None:
            agreed = f"{result.agreement:.1f} of {result.longest}, {result.same:.0%} equal"
            ended = " -> ".join(f"{share:.0%}" for share in result.ended)
            repeated = " -> ".join(f"{share:.1%}" for share in result.repetition)
            yield comparison.labels[model.source], agreed, ended, repeated
