"""Fit defaults to a model: options that a recipe does not state become what the model and the texts allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import psutil
import torch
from transformers import PreTrainedModel

from compress.data.ids import extent
from compress.data.text_source import Part, TextSource, as_source
from compress.errors import CalibrationError, TargetError
from compress.models.kinds.kinds import adapter_of, most_tokens
from compress.passes.contract.options import Options
from compress.passes.contract.passes import Pass
from compress.pipeline.sampled_text import MEMORY_SHARE, weights_bytes
from compress.recipe.calibration import Calibration
from compress.recipe.evaluation import Evaluate
from compress.recipe.order import label
from compress.recipe.schema import Recipe

GROUP_SIZES = (64, 32, 16)
"""Group sizes in place of a default that a layer or the format does not support, the first that they support."""

AUTO_SHARE = 0.5
"""Share of sampled text by `self_share: auto`: stories15M, gptq int4, KL 0.070 with a quarter, 0.066 with half or three
quarters, 0.080 with sampled text only, 0.104 without."""

AnyOptions = TypeVar("AnyOptions", bound=Options)
T = TypeVar("T")


def with_fitting_texts(
    recipe: Recipe, model: PreTrainedModel, evaluated: Sequence[TextSource | str]
) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with default lengths that the model has positions for, and a note on each change.

    The share of sampled text is decided, too (`self_share: auto`).

    Args:
        recipe: the recipe.
        model: its model, which may be without weights.
        evaluated: the texts of the evaluation.
    """
    texts = [text for text, _ in recipe.calibration.texts()]
    rows, tokens = _limits(model, texts, "calibration")
    limits = {"length": tokens} if recipe.calibration.mixture is not None else {"sequences": rows, "length": tokens}
    calibration, notes = _fitted(recipe.calibration, "calibration", limits)
    calibration, sampling_notes = with_self_share(calibration, recipe.passes, model)
    notes += sampling_notes
    evaluation = recipe.eval
    if evaluation is not None:
        evaluation, evaluation_notes = with_fitting_windows(evaluation, model, evaluated)
        notes += evaluation_notes
    return recipe.model_copy(update={"calibration": calibration, "eval": evaluation}), notes


def with_self_share(
    calibration: Calibration, passes: Sequence[Pass], model: PreTrainedModel
) -> tuple[Calibration, tuple[str, ...]]:
    """Return the calibration with a number in place of `self_share: auto`, and a note on the text that is sampled.

    The decision depends on the memory of the machine, not on what is free of it: a resumed run decides the same.

    Args:
        calibration: Of the recipe.
        passes: Of the recipe; without calibration they need no text.
        model: Its model, which may be without weights.
    """
    notes = []
    if calibration.self_share == "auto":
        samples = _may_sample(calibration, passes, model)
        size_bytes = weights_bytes(model)
        device = model.device.type
        memory_bytes = (
            torch.cuda.get_device_properties(model.device).total_memory
            if device == "cuda"
            else psutil.virtual_memory().total
        )
        fits = size_bytes <= MEMORY_SHARE * memory_bytes
        calibration = calibration.model_copy(update={"self_share": AUTO_SHARE if samples and fits else 0.0})
        if samples and not fits:
            notes.append(
                f"calibration: no text is sampled from the model (self_share: auto), because its weights "
                f"({size_bytes / 1e9:.1f} GB) take more than half of the memory"
            )
    sampled = sum(count or 0 for text, count in calibration.texts() if text.sampled)
    if sampled:
        tokens = sampled * (calibration.length or 0)
        operations = 2 * tokens * sum(parameter.numel() for parameter in model.parameters())
        notes.append(
            f"calibration: {sampled} of {calibration.sequences} sequences are sampled from the model itself: {tokens} "
            f"tokens, {operations / 1e12:.2g} TFLOP, once for a model and its options; self_share: 0 leaves them out"
        )
    return calibration, tuple(notes)


def _may_sample(calibration: Calibration, passes: Sequence[Pass], model: PreTrainedModel) -> bool:
    """Return whether `self_share: auto` has sequences of a text to replace, and a model that generates text."""
    replaces_text = not calibration.sampled and not calibration.stored
    divides = calibration.length is not None and (calibration.sequences or 0) > 1
    calibrates = any(step.requires.data for step in passes)
    return replaces_text and divides and calibrates and adapter_of(model).streams


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
