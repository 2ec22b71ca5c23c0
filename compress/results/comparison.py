"""The results of several models: the content of the JSON of `compress eval`, and its tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from compress.recipe.evaluation import Evaluate
from compress.recipe.tables import ResultTable, Shown
from compress.results.measurements.agreement import MEASURE_WORDS
from compress.results.measurements.base import plus_minus
from compress.results.measurements.generation import GenerationResult
from compress.results.measurements.tasks import TasksResult, change_of, metrics_in
from compress.results.result import ModelResult

TEXT_HEAD = ("model", "text", "predicted", "perplexity", "loss ± se", "bits per byte", "loss - base", "KL", "top-1")
TASK_HEAD = ("model", "task", "metric", "items", "value ± se", "against the base: difference [95%], flips, McNemar p")
AGREEMENT_HEAD = ("model", "text", "agreement with the base", "value ± se", "if equal")
ANSWER_HEAD = ("model", "tokens before they differ", "answers that end", "repeated 4-grams")

Rows = Iterator[tuple[str, ...]]


class Comparison(Shown, BaseModel):
    """The results of several models with the same settings.

    Attributes:
        compress: Version of this package.
        base: Source of the model that the others are compared with; None for one model alone.
        settings: What was measured.
        models: The models in the order of their measurement.
        notes: Notes of the journal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    compress: str
    base: str | None
    settings: Evaluate
    models: list[ModelResult]
    notes: list[str]

    @property
    def labels(self) -> dict[str, str]:
        """The ends of the paths of all models by source, as short as they differ."""
        parts = {model.source: Path(model.source).parts for model in self.models}
        most_parts = max((len(names) for names in parts.values()), default=1)
        for count in range(1, most_parts + 1):
            labels = {source: "/".join(names[-count:]) for source, names in parts.items()}
            if len(set(labels.values())) == len(labels):
                return labels
        return {source: source for source in parts}

    @property
    def failed(self) -> dict[str, str]:
        """The reason for each task that failed, by model and task."""
        return {f"{model.source} {name}": reason for model in self.models for name, reason in model.failed.items()}

    def tables(self) -> Iterator[ResultTable]:
        """Yield each table that has rows, without empty columns."""
        title = "" if self.base is None else f"compared with {self.base}"
        for head, rows in (
            (TEXT_HEAD, self.text_rows()),
            (AGREEMENT_HEAD, self.agreement_rows()),
            (TASK_HEAD, self.task_rows()),
            (ANSWER_HEAD, self.answer_rows()),
        ):
            table = ResultTable(title, head, list(rows)).without_empty_columns()
            if table.rows:
                yield table
                title = ""

    def text_rows(self) -> Rows:
        """Yield rows of `TEXT_HEAD`."""
        for model in self.models:
            for text in model.texts:
                score, divergence, change = text.compressed, text.divergence, text.difference
                bits = score.bits_per_byte
                yield (
                    self.labels[model.source],
                    text.text,
                    score.of,
                    f"{score.perplexity:.4f}",
                    plus_minus(score.loss, score.stderr, ".5f"),
                    "" if bits is None else plus_minus(bits, score.bits_stderr, ".4f"),
                    "" if change is None else plus_minus(change.loss, change.stderr, "+.5f"),
                    "" if divergence is None else plus_minus(divergence.mean, divergence.stderr, ".5f"),
                    "" if divergence is None else f"{divergence.agreement:.2%}",
                )

    def agreement_rows(self) -> Rows:
        """Yield rows of `AGREEMENT_HEAD`."""
        for model in self.models:
            for text in model.agreements:
                for name, measure in text.measures.items():
                    words = MEASURE_WORDS[name]
                    label = self.labels[model.source]
                    yield label, text.text, words.name, words.value_text(measure), words.perfect

    def task_rows(self) -> Rows:
        """Yield rows of `TASK_HEAD`."""
        for model in self.models:
            tasks: TasksResult | None = model.evaluations.get("tasks")
            row_by_metric = {} if tasks is None else {(row.task, row.metric): row for row in tasks.scores}
            for score, name, metric in metrics_in(model.items.values()):
                row = row_by_metric.get((score.task, name))
                value = plus_minus(metric.value, metric.stderr, ".4f")
                change = "" if row is None else change_of(row)
                label = self.labels[model.source]
                yield label, score.task, name, f"{score.items} of {score.of}", value, change

    def answer_rows(self) -> Rows:
        """Yield rows of `ANSWER_HEAD`."""
        for model in self.models:
            result: GenerationResult | None = model.evaluations.get("generation")
            if result is not None:
                agreed = f"{result.agreement:.1f} of {result.longest}, {result.same:.0%} equal"
                ended = " -> ".join(f"{share:.0%}" for share in result.ended)
                repeated = " -> ".join(f"{share:.1%}" for share in result.repetition)
                yield self.labels[model.source], agreed, ended, repeated
