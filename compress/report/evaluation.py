"""Evaluation: the typed result of `compress eval`, as JSON and as the rows of its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializeAsAny, TypeAdapter
from typing_extensions import Self

from compress.evaluate import EVALUATORS
from compress.evaluate.agreement import WORDS
from compress.evaluate.base import Record
from compress.evaluate.divergence import Divergence
from compress.evaluate.generation import GenerationResult
from compress.evaluate.perplexity import Difference, Score
from compress.evaluate.tasks import TaskScore, change_of, metrics_in, with_error
from compress.recipe.evaluation import Evaluate

TEXT_HEAD = ("model", "text", "predicted", "perplexity", "loss ± se", "bits per byte", "loss - base", "KL", "top-1")
TASK_HEAD = ("model", "task", "metric", "items", "value ± se", "against the base: difference [95%], flips, McNemar p")
AGREEMENT_HEAD = ("model", "text", "agreement with the base", "value ± se", "if equal")
ANSWER_HEAD = ("model", "tokens before they differ", "answers that end", "repeated 4-grams")


class TextScore(Record):
    """One model on one text, and its comparison with the base."""

    text: str
    windows: int
    length: int
    stride: int | None
    sha256: str
    score: Score
    difference: Difference | None = None
    divergence: Divergence | None = None


class ModelEvaluation(Record):
    """The results of one model.

    digest: of its files and the dtype. size_bytes: of its weight files. compared: the results of comparing evaluators
    with the base by key; empty for the base.
    """

    source: str
    digest: str
    size_bytes: int
    texts: list[TextScore]
    tasks: dict[str, TaskScore]
    failed: dict[str, str]
    compared: dict[str, SerializeAsAny[Any]]

    @classmethod
    def of(
        cls,
        source: str,
        digest: str,
        size_bytes: int,
        values: Mapping[str, Any],
        compared: Mapping[str, Any],
        failed: Mapping[str, str] | None = None,
    ) -> Self:
        """From the results of `Evaluator.measure` and of `combine`, by key; keys may lack where the evaluation failed.

        failed: reasons in addition to those of tasks.
        """
        tasks = values.get("tasks") or {"scores": {}, "failed": {}}
        differences = {row["text"]: row["difference"] for row in compared.get("perplexity") or ()}
        scores = values.get("perplexity") or {}
        texts = [{"text": name, "difference": differences.get(name)} | found for name, found in scores.items()]
        typed = {
            key: TypeAdapter(EVALUATORS[key].result_type).validate_python(value)
            for key, value in compared.items()
            if value is not None
        }
        return cls.model_validate(
            {
                "source": source,
                "digest": digest,
                "size_bytes": size_bytes,
                "texts": texts,
                "tasks": tasks["scores"],
                "failed": {**tasks["failed"], **(failed or {})},
                "compared": typed,
            }
        )


class Evaluation(BaseModel):
    """The results of several models with the same settings. base: the model that the others are compared with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compress: str
    base: str | None
    settings: Evaluate
    models: list[ModelEvaluation]
    notes: list[str]

    @property
    def labels(self) -> dict[str, str]:
        """The ends of the paths of all models, as short as they differ."""
        parts = {model.source: Path(model.source).parts for model in self.models}
        longest = max((len(found) for found in parts.values()), default=1)
        for count in range(1, longest + 1):
            ends = {source: "/".join(found[-count:]) for source, found in parts.items()}
            if len(set(ends.values())) == len(ends):
                return ends
        return {source: source for source in parts}

    @property
    def failed(self) -> dict[str, str]:
        """The reason for each task that failed, by model and task."""
        return {f"{model.source} {name}": why for model in self.models for name, why in model.failed.items()}

    def text_rows(self) -> Iterator[tuple[str, ...]]:
        """Rows of `TEXT_HEAD`."""
        for model in self.models:
            for row in model.texts:
                score, found, change = row.score, row.divergence, row.difference
                yield (
                    self.labels[model.source],
                    row.text,
                    score.of,
                    f"{score.perplexity:.4f}",
                    plus_minus(score.loss, score.stderr, ".5f"),
                    "" if score.bits_per_byte is None else plus_minus(score.bits_per_byte, score.bits_stderr, ".4f"),
                    "" if change is None else plus_minus(change.loss, change.stderr, "+.5f"),
                    "" if found is None else plus_minus(found.mean, found.stderr, ".5f"),
                    "" if found is None else f"{found.agreement:.2%}",
                )

    def agreement_rows(self) -> Iterator[tuple[str, ...]]:
        """Rows of `AGREEMENT_HEAD`."""
        for model in self.models:
            for text in model.compared.get("agreement") or ():
                for name, found in text.measures.items():
                    words = WORDS[name]
                    yield self.labels[model.source], text.text, words.name, words.shown(found), words.perfect

    def task_rows(self) -> Iterator[tuple[str, ...]]:
        """Rows of `TASK_HEAD`."""
        for model in self.models:
            compared = model.compared.get("tasks")
            known = {} if compared is None else {(row.task, row.metric): row for row in compared.scores}
            for score, name, metric in metrics_in({"scores": {n: s.model_dump() for n, s in model.tasks.items()}}):
                row = known.get((score.task, name))
                value = with_error(metric.value, metric.stderr)
                change = "" if row is None else change_of(row)
                yield self.labels[model.source], score.task, name, f"{score.items} of {score.of}", value, change

    def answer_rows(self) -> Iterator[tuple[str, ...]]:
        """Rows of `ANSWER_HEAD`."""
        for model in self.models:
            found: GenerationResult | None = model.compared.get("generation")
            if found is not None:
                (ended, ends), (before, after) = found.ended, found.repetition
                agreed = f"{found.agreement:.1f} of {found.longest}, {found.same:.0%} equal"
                yield self.labels[model.source], agreed, f"{ended:.0%} -> {ends:.0%}", f"{before:.1%} -> {after:.1%}"


def plus_minus(value: float, error: float | None, form: str) -> str:
    """A value with its standard error."""
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form.removeprefix('+')}}")
