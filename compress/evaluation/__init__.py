"""The evaluators, one file per measurement; the file's name is the key in report.json. Nothing is registered by hand.

The compressed model is measured as it was read back from its checkpoint.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from compress.checkpoint.inference import copies_within
from compress.evaluation.base import EvaluationContext, Evaluator
from compress.passes.contract.discovery import classes_by_file

EVALUATORS: dict[str, type[Evaluator]] = classes_by_file(__name__, __path__, Evaluator)
"""The class of every evaluator by its key."""


Results = dict[str, dict[str, Any] | None]
"""The results of evaluators on one model by their keys."""


def measure_all(
    model: PreTrainedModel, context: EvaluationContext, compare: bool = True, results: Results | None = None
) -> Results:
    """Measure a model with all evaluators that apply to it.

    Evaluators of the compressed model alone run first, because some of them reject a wrong checkpoint.

    Args:
        model: Model to measure.
        context: The run that it comes from.
        compare: Whether evaluators that measure the base model too run; the result of one that does not run is None.
        results: Receives each result as soon as it is known; None for a new mapping.

    Returns:
        The results by key.
    """
    results = {} if results is None else results
    for key, evaluator in measured_of(context.role):
        results[key] = measure_one(evaluator(), model, context) if compare or not evaluator.needs_base else None
    return results


def measured_of(role: str) -> list[tuple[str, type[Evaluator]]]:
    """Return the evaluators of the base or of the compressed model, in the order of `measure_all`."""
    ordered = sorted(EVALUATORS.items(), key=lambda item: item[1].needs_base)
    return [(key, evaluator) for key, evaluator in ordered if evaluator.needs_base or role == "compressed"]


def measure_one(evaluator: Evaluator, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any] | None:
    """Measure a model with one evaluator, within the memory for the copies of kernels."""
    if evaluator.timed:
        return evaluator.measure(model, context)
    with copies_within(model, context.copies_bytes):
        return evaluator.measure(model, context)


def combine_all(compressed: Results, base: Results) -> dict[str, Any]:
    """Compute the values in report.json by key from the results of `measure_all` on both models."""
    return {
        key: None if result is None else EVALUATORS[key]().combine(result, base.get(key))
        for key, result in compressed.items()
    }
