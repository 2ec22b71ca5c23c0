"""Check the models that a recipe compares with, before the run."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from compress.checkpoint.opened import OpenModel
from compress.checkpoint.sources.vocabulary import check_teacher
from compress.errors import ModelError, TargetError
from compress.models.kinds.contract import text_config
from compress.models.structure.blocks import find_blocks
from compress.passes.contract.passes import ModelPass, Step
from compress.pipeline.model_facts import ModelFacts
from compress.pipeline.resolve import ResolvedRecipe, layer_shapes, nothing_compressed, with_config
from compress.pipeline.sources import open_original, original_of
from compress.recipe.schema import Recipe
from compress.sweep.original import needs_original
from compress.train.objective import state_pairs


def check_teachers(resolved: ResolvedRecipe, facts: ModelFacts) -> tuple[str, ...]:
    """Compare each teacher with the model in the shape that it has before the pass."""
    recipe, steps, opened = resolved.recipe, resolved.steps, resolved.opened
    form = opened
    last = max((i for i, (_, step, _) in enumerate(steps) if step.requires.teacher), default=-1)
    for where, step, _ in steps[: last + 1]:
        source, teacher = step.requires.teacher, opened.model
        if isinstance(source, str):
            teacher = check_teacher(source, opened, recipe.trust_remote_code)
        elif source and (original := original_of(recipe.model)) != recipe.model:
            teacher = _original(original, recipe, opened, where)
        if not isinstance(step, ModelPass):
            continue
        if step.requires.paired_states:
            _check_states(step, form.model, teacher, where)
        if step.requires.new_shape:
            form = with_config(form, step.outcome(form.model, where))
    return ()


def _check_states(step: ModelPass, model: PreTrainedModel, teacher: PreTrainedModel, where: str) -> None:
    """Raise ModelError if the hidden states of a model and its teacher cannot be compared."""
    widths = text_config(model.config).hidden_size, text_config(teacher.config).hidden_size
    blocks = len(find_blocks(model)), len(find_blocks(teacher))
    try:
        state_pairs(widths, blocks, step.requires.layer_map)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error


def check_original(resolved: ResolvedRecipe, facts: ModelFacts) -> tuple[str, ...]:
    """Check that the blocks from before compression are known to passes that need them (`needs_original`)."""
    recipe, steps, opened = resolved.recipe, resolved.steps, resolved.opened
    label = needs_original(steps)
    if label is None:
        return ()
    source, form = original_of(recipe.model), opened
    before = steps[: [where for where, _, _ in steps].index(label)]
    if source == recipe.model and not before:
        raise TargetError(
            f"{label}: it compares blocks before and after compression, but the model that {source} was compressed "
            "from is not known: no run of compress wrote the folder; start from the uncompressed model"
        )
    for where, step, _ in before:
        if step.requires.new_shape and isinstance(step, ModelPass):
            form = with_config(form, step.outcome(form.model, where))
    own, original = layer_shapes(form), layer_shapes(open_original(recipe, opened))
    if own != original:
        name = next(name for name in [*own, *original] if own.get(name) != original.get(name))
        raise TargetError(
            f"{label}: it compares blocks before and after compression, but the blocks have changed their shape: "
            f"{name} is {own.get(name, 'missing')} here and {original.get(name, 'missing')} in {source}; "
            "put it directly after the passes that compress them"
        )
    return ()


def check_original_given(steps: Sequence[Step], given: bool) -> None:
    """Check the same for a model in memory. given: whether the caller gives the uncompressed model."""
    label = needs_original(steps)
    if label is not None and not given:
        names = next(names for where, _, names in steps if where == label)
        raise nothing_compressed(label, len(names), ", or give the uncompressed model (teacher=...)")


def _original(source: str, recipe: Recipe, opened: OpenModel, where: str) -> PreTrainedModel:
    """The uncompressed model of a recipe that starts with a compressed one, without weights."""
    try:
        return check_teacher(source, opened, recipe.trust_remote_code)
    except ModelError as error:
        raise ModelError(
            f"{where}: the uncompressed model of {recipe.model} is {source} by its recipe.yaml, which cannot be its "
            f"teacher ({error}); name another one (teacher: ...)"
        ) from error
