"""Check before the run what passes need: the models that they compare with, and layers with the same input."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from transformers import PreTrainedModel

from compress.blockwise.original import needs_original
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.sources.vocabulary import check_teacher
from compress.errors import ModelError, TargetError
from compress.layers.linear import linears
from compress.layers.scheme import LayerScheme, transform_class
from compress.models.kinds.contract import text_config
from compress.models.structure.blocks import Block, find_blocks
from compress.passes.contract.passes import BlockPass, ModelPass, Step
from compress.pipeline.input_groups import InputGroups, input_groups
from compress.pipeline.model_facts import ModelFacts
from compress.pipeline.resolve import (
    ResolvedRecipe,
    importance_of,
    layer_shapes,
    nothing_compressed,
    own_options,
    schemes_of,
    with_config,
)
from compress.pipeline.sources import open_original, original_of
from compress.recipe.schema import Recipe
from compress.train.objective import state_pairs


def check_imatrix(resolved: ResolvedRecipe, facts: ModelFacts) -> tuple[str, ...]:
    """Raise an error for an importance matrix that lacks a layer of the pass that reads it, or has another width."""
    importance = importance_of(resolved)
    for _, step, names in resolved.steps:
        for name in names:
            file = own_options(step, name).requires.imatrix
            if file is not None:
                importance(name, file, resolved.shapes[name][1])
    return ()


def check_teachers(resolved: ResolvedRecipe, facts: ModelFacts) -> tuple[str, ...]:
    """Compare each teacher with the model in the shape that it has before the pass."""
    recipe, steps, opened = resolved.recipe, resolved.steps, resolved.opened
    form = opened
    last_teacher = max((i for i, (_, step, _) in enumerate(steps) if step.requires.teacher), default=-1)
    for label, step, _ in steps[: last_teacher + 1]:
        source, teacher = step.requires.teacher, opened.model
        if isinstance(source, str):
            teacher = check_teacher(source, opened, recipe.trust_remote_code)
        elif source and (original := original_of(recipe.model)) != recipe.model:
            teacher = _original(original, recipe, opened, label)
        if not isinstance(step, ModelPass):
            continue
        if step.requires.paired_states:
            _check_states(step, form.model, teacher, label)
        if step.requires.new_shape:
            form = with_config(form, step.outcome(form.model, label))
    return ()


def _check_states(step: ModelPass, model: PreTrainedModel, teacher: PreTrainedModel, label: str) -> None:
    """Raise ModelError if the hidden states of a model and its teacher cannot be compared."""
    widths = text_config(model.config).hidden_size, text_config(teacher.config).hidden_size
    blocks = len(find_blocks(model)), len(find_blocks(teacher))
    try:
        state_pairs(widths, blocks, step.requires.layer_map)
    except ModelError as error:
        raise ModelError(f"{label}: {error}") from error


def check_original(resolved: ResolvedRecipe, facts: ModelFacts) -> tuple[str, ...]:
    """Check that the blocks from before compression are known to passes that need them (`needs_original`)."""
    recipe, steps, opened = resolved.recipe, resolved.steps, resolved.opened
    label = needs_original(steps)
    if label is None:
        return ()
    source, form = original_of(recipe.model), opened
    earlier_steps = steps[: [step_label for step_label, _, _ in steps].index(label)]
    if source == recipe.model and not earlier_steps:
        raise TargetError(
            f"{label}: it compares blocks before and after compression, but the model that {source} was compressed "
            "from is not known: no run of compress wrote the folder; start from the uncompressed model"
        )
    for step_label, step, _ in earlier_steps:
        if step.requires.new_shape and isinstance(step, ModelPass):
            form = with_config(form, step.outcome(form.model, step_label))
    shapes, original = layer_shapes(form), layer_shapes(open_original(recipe, opened))
    if shapes != original:
        name = next(name for name in [*shapes, *original] if shapes.get(name) != original.get(name))
        raise TargetError(
            f"{label}: it compares blocks before and after compression, but the blocks have changed their shape: "
            f"{name} is {shapes.get(name, 'missing')} here and {original.get(name, 'missing')} in {source}; "
            "put it directly after the passes that compress them"
        )
    return ()


def check_shared_inputs(resolved: ResolvedRecipe, facts: ModelFacts) -> tuple[str, ...]:
    """Check that block passes, which change the inputs of their layers, find no quantized layer with the same input.

    Layers whose inputs an earlier pass may transform in different ways are left to the run.

    Raises:
        TargetError: for such a layer.
    """
    quantized = {name for name, scheme in schemes_of(resolved.opened).items() if scheme.quantized}
    transformed: dict[str, list[str]] = {}
    blocks, groups = resolved.opened.blocks, None
    for label, step, names in resolved.steps:
        if isinstance(step, BlockPass) and "quantized" in step.never_after and quantized:
            groups = input_groups(resolved.opened) if groups is None else groups
            for block in blocks:
                _check_block(block, groups, set(names), quantized, transformed, label)
        if step.requires.new_shape:
            blocks, quantized, transformed = resolved.form.blocks, set(), {}
        shapes = resolved.shapes
        for name in names:
            effects = own_options(step, name).effects(LayerScheme(shapes[name]))
            if "quantized" in effects.facts:
                quantized.add(name)
            if any(transform_class(transform.kind).linear for transform in effects.largest_scheme.transforms):
                transformed.setdefault(name, []).append(label)
    return ()


def _check_block(
    block: Block,
    groups: InputGroups,
    names: Collection[str],
    quantized: Collection[str],
    transformed: Mapping[str, Sequence[str]],
    label: str,
) -> None:
    for group in groups.get(frozenset(linears(block.module)), ()):
        members = [f"{block.name}.{name}" for name in group.linears]
        changes = [transformed.get(name, []) for name in members if name in names]
        for name in members:
            if changes and name not in names and name in quantized and transformed.get(name, []) in changes:
                raise TargetError(
                    f"{label}: {name} is quantized and reads the same input as a layer of this pass; put this pass "
                    "before the quantization of both"
                )


def check_original_given(steps: Sequence[Step], has_original: bool) -> None:
    """Check the same for a model in memory. has_original: whether the caller gives the uncompressed model."""
    label = needs_original(steps)
    if label is not None and not has_original:
        names = next(names for step_label, _, names in steps if step_label == label)
        raise nothing_compressed(label, len(names), ", or give the uncompressed model (teacher=...)")


def _original(source: str, recipe: Recipe, opened: OpenModel, label: str) -> PreTrainedModel:
    """Return the uncompressed model of a recipe that starts with a compressed one, without weights."""
    try:
        return check_teacher(source, opened, recipe.trust_remote_code)
    except ModelError as error:
        raise ModelError(
            f"{label}: the uncompressed model of {recipe.model} is {source} by its recipe.yaml, which cannot be its "
            f"teacher ({error}); name another one (teacher: ...)"
        ) from error
