"""Fit defaults to a model: options that a recipe does not state become what the model and the texts allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from transformers import PreTrainedModel

from compress.data.ids import extent
from compress.data.text_source import Part, TextSource, as_source
from compress.errors import CalibrationError, TargetError
from compress.models.kinds.kinds import most_tokens
from compress.passes.contract.options import Options
from compress.passes.contract.passes import Pass
from compress.recipe.evaluation import Evaluate
from compress.recipe.order import label
from compress.recipe.schema import Recipe

GROUP_SIZES = (64, 32, 16)
"""Group sizes in place of a default that a layer or the format does not support, the first that they support."""

AnyOptions = TypeVar("AnyOptions", bound=Options)
T = TypeVar("T")


def with_fitting_texts(
    recipe: Recipe, model: PreTrainedModel, evaluated: Sequence[TextSource | str]
) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with default lengths that the model has positions for, and a note on each change.

    Args:
        recipe: the recipe.
        model: its model, which may be without weights.
        evaluated: the texts of the evaluation.
    """
    texts = [text for text, _ in recipe.calibration.texts()]
    rows, tokens = _limits(model, texts, "calibration")
    limits = {"length": tokens} if recipe.calibration.mixture is not None else {"sequences": rows, "length": tokens}
    calibration, notes = _fitted(recipe.calibration, "calibration", limits)
    evaluation = recipe.eval
    if evaluation is not None:
        evaluation, evaluation_notes = with_fitting_windows(evaluation, model, evaluated)
        notes += evaluation_notes
    return recipe.model_copy(update={"calibration": calibration, "eval": evaluation}), notes


def with_fitting_windows(
    settings: Evaluate, model: PreTrainedModel, texts: Sequence[TextSource | str]
) -> tuple[Evaluate, tuple[str, ...]]:
    """Return the evaluation with default windows that the model has positions for, and a note on each change."""
    rows, tokens = _limits(model, [as_source(text) for text in texts], "test")
    return _fitted(settings, "eval", {"windows": rows, "length": tokens})


def with_fitting_groups(
    passes: Sequence[Pass], resolve: Callable[[Sequence[Pass]], T]
) -> tuple[Sequence[Pass], T, tuple[str, ...]]:
    """Resolve passes, with smaller groups where the default group size does not fit the model and the format.

    Args:
        passes: the passes of a recipe.
        resolve: raises TargetError for passes that do not fit.

    Returns:
        The passes, the result of `resolve`, and a note on each change.

    Raises:
        TargetError: if no group size fits; the error of the passes as they are.
    """
    try:
        return passes, resolve(passes), ()
    except TargetError as error:
        for size, smaller in _with_smaller_groups(passes):
            try:
                resolved = resolve(smaller)
            except TargetError:
                continue
            changed = [label(i, step) for i, step in enumerate(passes) if step is not smaller[i]]
            reason = f"group_size is {size}, since the default does not fit ({error})"
            return smaller, resolved, tuple(f"{name}: {reason}" for name in changed)
        raise


def _with_smaller_groups(passes: Sequence[Pass]) -> Iterator[tuple[int, tuple[Pass, ...]]]:
    for size in GROUP_SIZES:
        smaller = tuple(
            step.model_copy(update={"group_size": size})
            if isinstance(default := getattr(step, "group_size", None), int)
            and default > size
            and "group_size" not in step.model_fields_set
            else step
            for step in passes
        )
        if any(new is not old for new, old in zip(smaller, passes, strict=True)):
            yield size, smaller


def _limits(model: PreTrainedModel, texts: Sequence[TextSource], part: Part) -> tuple[int | None, int | None]:
    """Return the most sequences and tokens per sequence that the texts and the model allow; None: no limit is known."""
    rows, tokens = [], [most_tokens(model)]
    for text in texts:
        if text.stored:
            try:
                shape = extent(text, part, None, None)
            except CalibrationError:
                continue  # the check of texts raises it
            rows.append(shape[0])
            tokens.append(shape[1])
    return min(rows, default=None), min((count for count in tokens if count is not None), default=None)


def _fitted(options: AnyOptions, key: str, limits: Mapping[str, int | None]) -> tuple[AnyOptions, tuple[str, ...]]:
    """Return options whose defaults are within limits, and a note on each change."""
    changes = {
        name: limit
        for name, limit in limits.items()
        if limit is not None
        and name not in options.model_fields_set
        and (default := getattr(options, name)) is not None
        and 1 < limit < default
    }
    notes = [
        f"{key}: {name} is {new}, the most that the model and the texts have, not the default {getattr(options, name)}"
        for name, new in changes.items()
    ]
    return options.model_copy(update=changes), tuple(notes)
