"""Zero-shot tasks of lm-eval: scores with standard errors, and both models compared on the same items."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, ClassVar

from transformers import PreTrainedModel

from compress.evaluation.base import EvaluationContext, Evaluator
from compress.evaluation.harness.adapter import harness_model
from compress.evaluation.harness.tasks import TaskError, load_tasks, run_task, task_manager
from compress.models.kinds.kinds import answers_tasks, described
from compress.numerics.statistics import difference_interval, flips, mcnemar, mean, student_95
from compress.results.measurements.tasks import Pairing, TaskComparison, TaskScore


class Tasks(Evaluator):
    """The tasks of the settings; None if there are none. A task that fails does not stop the others."""

    needs_base: ClassVar[bool] = True

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any] | None:
        """Measure the scores of all tasks; failures are returned by task.

        Raises:
            RecipeError: if lm-eval is not installed.
        """
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
                context.run.journal.add("note", f"tasks {context.role}", str(failure))
        facts = {"chat_template": settings.chat_template, "limit": settings.limit, "seed": settings.seed}
        return {"scores": scores, "failed": failed, **facts, "lm_eval": lm_eval.__version__}

    def _score(self, name: str, task: Any, harness: Any, context: EvaluationContext) -> dict[str, Any]:
        begin, truncated_before = perf_counter(), harness.answers.truncated
        harness.answers.progress = context.progress(f"{name} of {context.model}")
        result = run_task(name, task, harness, context.settings)
        if truncated := harness.answers.truncated - truncated_before:
            message = (
                f"{truncated} requests are longer than the model's context of {harness.max_length} and lost their start"
            )
            context.run.journal.add("note", name, message)
        return TaskScore.model_validate({**result, "seconds": perf_counter() - begin}).model_dump()

    def combine(self, compressed: dict[str, Any] | None, base: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return a `TasksResult` as JSON; a task that failed on one model is among the failed ones."""
        if compressed is None or base is None:
            return None
        scores = [
            compare(
                TaskScore.model_validate(base["scores"][name]), TaskScore.model_validate(measured), metric
            ).model_dump()
            for name, measured in compressed["scores"].items()
            if name in base["scores"]
            for metric in measured["metrics"]
        ]
        facts = {key: compressed[key] for key in ("chat_template", "limit", "seed", "lm_eval")}
        return {"scores": scores, "failed": {**base["failed"], **compressed["failed"]}, **facts}


def check_model(name: str, model: PreTrainedModel, context: EvaluationContext) -> None:
    """Check that a model can answer tasks.

    Raises:
        TaskError: if it cannot.
    """
    if context.tokenizer is None:
        raise TaskError(f"task {name}: the model has no tokenizer; add its tokenizer files to the folder")
    if not answers_tasks(model):
        raise TaskError(f"task {name}: {described(model)}; tasks need next tokens")
    if context.settings.chat_template and context.tokenizer.chat_template is None:
        raise TaskError(f"task {name}: the tokenizer has no chat template; write chat_template: false")


def harness_of(model: PreTrainedModel, context: EvaluationContext) -> Any:
    """Wrap the model as an LM of lm-eval, with its stored results."""
    assert context.tokenizer is not None
    note = lambda text: context.run.journal.add("note", "tasks", text)  # noqa: E731
    results = context.store.results("requests")
    return harness_model(model, context.tokenizer, results, lambda done, of: None, note)


def compare(base: TaskScore, compressed: TaskScore, metric: str) -> TaskComparison:
    """Compare one metric of two models on the same items."""
    base_metric, compressed_metric = base.metrics[metric], compressed.metrics[metric]
    return TaskComparison(
        task=compressed.task,
        metric=metric,
        items=compressed.items,
        of=compressed.of,
        fewshot=compressed.fewshot,
        higher_is_better=compressed_metric.higher_is_better,
        base=base_metric.value,
        base_stderr=base_metric.stderr,
        compressed=compressed_metric.value,
        compressed_stderr=compressed_metric.stderr,
        paired=pairing(base_metric.values, compressed_metric.values),
    )


def pairing(base: Sequence[float] | None, compressed: Sequence[float] | None) -> Pairing | None:
    """Compare the values of the same items; None if they cannot be paired."""
    if base is None or compressed is None or len(base) != len(compressed) or not base:
        return None
    change = mean(
        [compressed_value - base_value for base_value, compressed_value in zip(base, compressed, strict=True)]
    )
    if set(base) | set(compressed) <= {0.0, 1.0}:
        counted = flips(base, compressed)
        low, high = difference_interval(counted)
        p = mcnemar(counted.gained, counted.lost)
        answers = {"gained": counted.gained, "lost": counted.lost, "p": p}
        return Pairing(difference=change.value, stderr=change.stderr, low=low, high=high, **answers)
    spread = None if change.stderr is None else student_95(len(base)) * change.stderr
    low, high = (None, None) if spread is None else (change.value - spread, change.value + spread)
    return Pairing(difference=change.value, stderr=change.stderr, low=low, high=high)
