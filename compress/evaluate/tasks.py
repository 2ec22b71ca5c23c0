"""Zero-shot tasks of lm-eval: scores with standard errors, and both models compared on the same items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any, ClassVar

from transformers import PreTrainedModel

from compress.evaluate.base import EvaluationContext, Evaluator, Record, SummaryRow, plus_minus
from compress.evaluate.harness.adapter import harness_model
from compress.evaluate.harness.tasks import TaskError, load_tasks, run_task, task_manager
from compress.models.kinds.kinds import answers_tasks, described
from compress.numerics.statistics import difference_interval, flips, mcnemar, mean


class Metric(Record):
    """A metric of one model on one task. stderr: over items. values: of each item, None where items have no value."""

    value: float
    stderr: float | None
    higher_is_better: bool
    values: list[float] | None = None


class TaskScore(Record):
    """The metrics of one model on one task. items: evaluated, of so many. version: of the task."""

    task: str
    version: str
    fewshot: int
    items: int
    of: int
    seconds: float
    metrics: dict[str, Metric]


class Pairing(Record):
    """Two models on the same items: the mean difference (compressed minus base), its standard error and 95% interval.

    gained, lost: items that only the compressed, only the base model answers right; p: exact McNemar test. The three
    are None for metrics that are not right or wrong.
    """

    difference: float
    stderr: float | None
    low: float | None
    high: float | None
    gained: int | None = None
    lost: int | None = None
    p: float | None = None


class TaskComparison(Record):
    """A metric of both models on one task; paired is None where items have no values or differ in number."""

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


class Tasks(Evaluator):
    """The tasks of the settings; None if there are none. A task that fails does not stop the others."""

    needs_base: ClassVar[bool] = True
    result_type: ClassVar[Any] = TasksResult

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any] | None:
        """Scores by task, failures by task, and the settings. Raises RecipeError when lm-eval is not installed."""
        settings = context.settings
        if not settings.tasks:
            return None
        manager = task_manager(settings)
        import lm_eval

        scores: dict[str, Any] = {}
        failed: dict[str, str] = {}
        harness: Any = None
        for name in settings.tasks:
            try:
                check_model(name, model, context)
                harness = harness or harness_of(model, context)
                for part, task in load_tasks(name, manager, settings).items():
                    scores[part] = self._score(part, task, harness, context)
            except TaskError as failure:
                failed[name] = str(failure)
                context.run.journal.add("note", f"tasks {context.which}", str(failure))
        facts = {"chat_template": settings.chat_template, "limit": settings.limit, "seed": settings.seed}
        return {"scores": scores, "failed": failed, **facts, "lm_eval": lm_eval.__version__}

    def _score(self, name: str, task: Any, harness: Any, context: EvaluationContext) -> dict[str, Any]:
        begin, before = perf_counter(), harness.answers.truncated
        harness.answers.progress = context.progress(f"{name} of {context.model}")
        found = run_task(name, task, harness, context.settings)
        if cut := harness.answers.truncated - before:
            message = f"{cut} requests are longer than the model's context of {harness.max_length} and lost their start"
            context.run.journal.add("note", name, message)
        return TaskScore.model_validate({**found, "seconds": perf_counter() - begin}).model_dump()

    def combine(self, compressed: dict[str, Any] | None, base: dict[str, Any] | None) -> dict[str, Any] | None:
        """A `TasksResult` as JSON; a task that failed on one model is among the failed ones."""
        if compressed is None or base is None:
            return None
        scores = [
            compare(
                TaskScore.model_validate(base["scores"][name]), TaskScore.model_validate(found), metric
            ).model_dump()
            for name, found in compressed["scores"].items()
            if name in base["scores"]
            for metric in found["metrics"]
        ]
        facts = {key: compressed[key] for key in ("chat_template", "limit", "seed", "lm_eval")}
        return {"scores": scores, "failed": {**base["failed"], **compressed["failed"]}, **facts}

    def summary(self, result: TasksResult) -> list[SummaryRow]:
        return [
            (
                f"{row.task} {row.metric} ({row.items} items)",
                plus_minus(row.base, row.base_stderr, ".4f"),
                plus_minus(row.compressed, row.compressed_stderr, ".4f"),
                change_of(row),
            )
            for row in result.scores
        ]


def check_model(name: str, model: PreTrainedModel, context: EvaluationContext) -> None:
    """Raise TaskError for a model that cannot answer tasks."""
    if context.tokenizer is None:
        raise TaskError(f"task {name}: the model has no tokenizer; add its tokenizer files to the folder")
    if not answers_tasks(model):
        raise TaskError(f"task {name}: {described(model)}; tasks need next tokens")
    if context.settings.chat_template and context.tokenizer.chat_template is None:
        raise TaskError(f"task {name}: the tokenizer has no chat template; write chat_template: false")


def harness_of(model: PreTrainedModel, context: EvaluationContext) -> Any:
    """The model as an LM of lm-eval, with its kept results."""
    assert context.tokenizer is not None
    note = lambda text: context.run.journal.add("note", "tasks", text)  # noqa: E731
    results = context.store.results("requests")
    return harness_model(model, context.tokenizer, results, lambda done, of: None, note)


def compare(base: TaskScore, compressed: TaskScore, metric: str) -> TaskComparison:
    """One metric of two models on the same items."""
    first, second = base.metrics[metric], compressed.metrics[metric]
    return TaskComparison(
        task=compressed.task,
        metric=metric,
        items=compressed.items,
        of=compressed.of,
        fewshot=compressed.fewshot,
        higher_is_better=second.higher_is_better,
        base=first.value,
        base_stderr=first.stderr,
        compressed=second.value,
        compressed_stderr=second.stderr,
        paired=pairing(first.values, second.values),
    )


def pairing(base: Sequence[float] | None, compressed: Sequence[float] | None) -> Pairing | None:
    """Compare the values of the same items; None where they cannot be paired."""
    if base is None or compressed is None or len(base) != len(compressed) or not base:
        return None
    found = mean([after - before for before, after in zip(base, compressed, strict=True)])
    if set(base) | set(compressed) <= {0.0, 1.0}:
        counted = flips(base, compressed)
        low, high = difference_interval(counted)
        p = mcnemar(counted.gained, counted.lost)
        answers = {"gained": counted.gained, "lost": counted.lost, "p": p}
        return Pairing(difference=found.value, stderr=found.stderr, low=low, high=high, **answers)
    spread = None if found.stderr is None else 1.96 * found.stderr
    low, high = (None, None) if spread is None else (found.value - spread, found.value + spread)
    return Pairing(difference=found.value, stderr=found.stderr, low=low, high=high)


def change_of(row: TaskComparison) -> str:
    """The difference with its interval, flips and p-value in words."""
    found = row.paired
    if found is None:
        return f"{row.compressed - row.base:+.4f}"
    interval = "" if found.low is None or found.high is None else f" [{found.low:+.4f}, {found.high:+.4f}]"
    counts = "" if found.p is None else f", +{found.gained} -{found.lost}, p {found.p:.2g}"
    return f"{found.difference:+.4f}{interval}{counts}"


def metrics_in(scores: Iterable[TaskScore]) -> Iterator[tuple[TaskScore, str, Metric]]:
    """Yield (score, name, metric) of all metrics."""
    for score in scores:
        for name, metric in score.metrics.items():
            yield score, name, metric
