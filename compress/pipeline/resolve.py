"""Resolve a recipe on a model, once and before it runs: linears, final options, format, dtypes, objective."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.checkpoint.formats.base import Format
from compress.checkpoint.opened import OpenModel, Weights
from compress.checkpoint.opening import open_model
from compress.checkpoint.sources.supported import check_supported
from compress.checkpoint.sources.vocabulary import check_kind, check_teacher
from compress.errors import ModelError, TargetError
from compress.layers.embedding import layer_of
from compress.layers.linear import CompressedLinear, linears, scheme_of, shape_of
from compress.layers.scheme import LayerScheme, transform_class
from compress.models.caches.attentions import attentions_containing, cache_policies
from compress.models.kinds.batch import Batch
from compress.models.kinds.causal import CAUSAL
from compress.models.kinds.contract import ModelKind, text_config
from compress.models.kinds.kinds import objective_of
from compress.models.reshape.reconfigure import sketch
from compress.models.structure.blocks import find_blocks
from compress.models.structure.ends import end_layer, find_ends
from compress.models.structure.select import ModuleNames
from compress.numerics.dtypes import DTYPES
from compress.passes.contract.context import Run
from compress.passes.contract.facts import ANY_LAYER, Fact
from compress.passes.contract.journal import Journal
from compress.passes.contract.passes import ModelPass, Pass, Step, chosen_linears
from compress.pipeline.ends import check_ends
from compress.pipeline.texts import suited
from compress.recipe.order import in_words, label, unprepared
from compress.recipe.schema import Recipe
from compress.sweep.capture import ModelShell
from compress.sweep.quantized_embeddings import embeddings_of
from compress.train.options import missing_kind

EARLIER: dict[Fact, str] = {
    "masked": "earlier passes (masks: forget in the recipe drops the zeros of a dense model)",
    "quantized": "earlier passes",
    "activations_quantized": "earlier passes",
    "cache_quantized": "earlier passes",
}
"""The origin of a fact of the original model, for messages."""


def storage_dtype(recipe: Recipe, opened: OpenModel) -> torch.dtype:
    """The dtype of stored scales and dense tensors; auto: 16 bits unless the source needs more."""
    return opened.storage if recipe.save.dtype == "auto" else DTYPES[recipe.save.dtype]


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe on one model: what planning, running, verifying and evaluating it depend on.

    Attributes:
        recipe: Source, texts, seed and options; its evaluation is without what the model cannot answer.
        opened: The model before the first pass, on its device and in its dtype of computation.
        steps: The passes with their final options and linears. A pass that changes the shape of the model at run time
            updates the linears of later passes (`update_targets`).
        form: The model after the last pass, without weights if a pass changes its shape.
        storage: The dtype of stored dense tensors and, unless the format fixes theirs, of scales.
        format: The format of the checkpoint.
        objective: The language-model objective, if a pass uses it.
        sample: A row of inputs with which the model runs.
        left_out: A note on what the evaluation leaves out.
    """

    recipe: Recipe
    opened: OpenModel
    steps: tuple[Step, ...]
    form: OpenModel
    storage: torch.dtype
    format: Format
    objective: ModelKind
    sample: Batch
    left_out: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape (out, in) of every linear before and after the passes, by full name."""
        return layer_shapes(self.form) | layer_shapes(self.opened)

    def with_calibration(self, **changes: int) -> ResolvedRecipe:
        """Return the recipe with other options of its calibration."""
        calibration = self.recipe.calibration.model_copy(update=changes)
        return replace(self, recipe=self.recipe.model_copy(update={"calibration": calibration}))


def resolve(recipe: Recipe, opened: OpenModel) -> ResolvedRecipe:
    """Resolve a recipe on a model, after a forward pass of a few tokens without blocks (`ModelShell.check`).

    Raises:
        ModelError: for a model that cannot run, that the format cannot store, or without a mask token that a pass uses.
        TargetError: as `resolve_passes`.
        RecipeError: for an evaluation that the model cannot answer, and options without effect on the objective.
    """
    sample = ModelShell(opened).check()
    storage = storage_dtype(recipe, opened)
    format_ = recipe.save.target().stored_in(storage)
    if reason := format_.refuses_model(embeddings_of(opened)):
        raise ModelError(f"save: format {recipe.save.format}: {reason}; use another format, such as native")
    steps, form = resolve_passes(recipe.passes, opened, format_)
    evaluation, left_out = suited(recipe.eval, opened.model)
    recipe = recipe.model_copy(update={"eval": evaluation})
    objective = lm_objective_for(steps, opened, recipe.seed)
    return ResolvedRecipe(recipe, opened, tuple(steps), form, storage, format_, objective, sample, left_out)


def run_of(resolved: ResolvedRecipe, journal: Journal, **services: Any) -> Run:
    """Return the run of a recipe.

    Args:
        services: the other attributes of `Run`: calibration, teachers, processes, ...
    """
    recipe, objective = resolved.recipe, resolved.objective
    stored = recipe.seed, resolved.format, recipe.save.sparse
    return Run(resolved.opened.device, resolved.storage, *stored, journal, lm_objective=objective, **services)


def resolve_passes(
    passes: Sequence[Pass], opened: OpenModel, format_: Format, first: int = 0
) -> tuple[list[Step], OpenModel]:
    """Return every pass with its linears, and the model after the last pass, without weights if its shape changes.

    first: the index of the first of these passes in the recipe.

    Raises TargetError: a pattern matches nothing, a later pass cannot work on a layer after an earlier pass, no later
    pass does what a layer was prepared for, a layer or the format does not support a group size, or the model cannot
    have a shape.
    """
    names, facts, schemes = opened.linear_names(), _facts(opened), schemes_of(opened)
    _check_start(schemes, format_)
    most = dict(schemes)
    steps: list[Step] = []
    swept: set[str] = set()
    for index, step in enumerate(passes, first):
        where, needs = label(index, step), step.requires
        _check_stacks(step, opened, where)
        modules = ModuleNames.of(opened.model, opened.blocks)
        ends, candidates = modules.reached(step.targets), modules.candidates(step.targets)
        step = step.on_model(modules, where)
        chosen = chosen_linears(step, candidates, where)
        chosen = [name for name in chosen if name not in {end.embedding for end in ends if end.head is not None}]
        check_ends(step, [end for end in ends if end.name in chosen], where)
        if step.effects(ANY_LAYER).cache is not None:
            chosen = _in_attention(opened, names, chosen, where)
        _check_facts(step, list(facts) if needs.new_shape else chosen, facts, where)
        _check_sweep(step, chosen, swept, facts, where)
        swept = set() if isinstance(step, ModelPass) else swept | set(chosen)
        _check_mixed(step, list(schemes) if needs.new_shape else chosen, schemes, where)
        _check_trained(step, _together(step, chosen, opened), schemes, format_, where)
        _check_layers(step, chosen, schemes, format_, where)
        _check_transforms(step, chosen, most, format_, where)
        steps.append((where, step, chosen))
        if isinstance(step, ModelPass) and needs.new_shape:
            opened = with_config(opened, step.outcome(opened.model, where))
            names, facts, schemes = opened.linear_names(), _facts(opened), schemes_of(opened)
            schemes |= {n: own_options(step, n).effects(schemes[n]).scheme for n in chosen if n in schemes}
            most = dict(schemes)
        else:
            for name in chosen:
                facts[name] |= dict.fromkeys(own_options(step, name).effects(ANY_LAYER).facts, where)
    _check_prepared(steps, {name: scheme.shape for name, scheme in schemes.items()})
    return steps, opened


def with_config(opened: OpenModel, config: PretrainedConfig) -> OpenModel:
    """The model of another configuration, without weights. Raises ModelError if transformers cannot build it."""
    model = sketch(opened.model, config)
    if model is None:
        raise ModelError(f"model: transformers {transformers.__version__} cannot build it from its configuration")
    return replace(opened, model=model, blocks=find_blocks(model), weights=Weights(reading=opened.weights.reading))


def update_targets(steps: Sequence[Step], opened: OpenModel, format_: Format, done: int) -> None:
    """Update the linears of all steps after the first `done` to those of the model in its new shape."""
    rest = [step for _, step, _ in steps[done:]]
    updated, _ = resolve_passes(rest, opened, format_, done)
    for (_, _, names), (_, _, now) in zip(steps[done:], updated, strict=True):
        names[:] = now


def _facts(opened: OpenModel) -> dict[str, dict[Fact, str]]:
    """The facts of every linear of the original model, each with its origin."""
    ends = [end.name for end in find_ends(opened.model)]
    found: dict[str, dict[Fact, str]] = {name: {} for name in [*opened.linear_names(), *ends]}
    for name in found:
        layer = layer_of(opened.model.get_submodule(name)) if name in ends else opened.model.get_submodule(name)
        if isinstance(layer, CompressedLinear):
            true: dict[Fact, bool] = {
                "masked": layer.positions is not None,
                "quantized": layer.quantized,
                "activations_quantized": layer.rounding is not None,
            }
            found[name] = {fact: EARLIER[fact] for fact, holds in true.items() if holds}
    attentions = tuple(f"{attention}." for attention in cache_policies(opened.model))
    for name in found:
        if name.startswith(attentions):
            found[name]["cache_quantized"] = EARLIER["cache_quantized"]
    return found


def schemes_of(opened: OpenModel) -> dict[str, LayerScheme]:
    """The storage scheme of every linear in the blocks, and of the ends, of the original model."""
    found = {
        f"{block.name}.{name}": scheme_of(module)
        for block in opened.blocks
        for name, module in linears(block.module).items()
    }
    return found | {end.name: end_layer(opened.model, end).scheme for end in find_ends(opened.model)}


def _check_stacks(step: Pass, opened: OpenModel, where: str) -> None:
    """Raise TargetError if a pass knows one stack of blocks only, and the model has two."""
    does = "changes the shape of a model" if step.requires.new_shape else "quantizes the KV cache of a model"
    if opened.blocks[-1].stack and (step.requires.new_shape or step.effects(ANY_LAYER).cache is not None):
        raise TargetError(
            f"{where}: it {does} with one stack of blocks, but {type(opened.model).__name__} has two, those of an "
            f"encoder and of a decoder; remove {step.key()}"
        )


def _check_start(schemes: dict[str, LayerScheme], format_: Format) -> None:
    """Raise TargetError if the format cannot store a linear as it is before the first pass."""
    for name, scheme in schemes.items():
        stored = scheme if format_.sparse else scheme.folded(keep_zeros=False)
        reason = None if stored.plain else format_.refuses(stored)
        if reason is not None:
            raise TargetError(f"model: {name} is compressed already: {reason}")


def _check_facts(step: Pass, names: Sequence[str], facts: dict[str, dict[Fact, str]], where: str) -> None:
    for fact in sorted(step.never_after):
        for name in names:
            if fact in facts[name]:
                again = fact in step.effects(ANY_LAYER).facts
                remedy = "skip it with ignore" + ("" if again else f", or put {step.key()} first")
                raise TargetError(f"{where}: {name} is already {in_words(fact)} by {facts[name][fact]}; {remedy}")
    for name in names:
        grids = own_options(step, name).effects(ANY_LAYER).scheme.grids if "masked" in facts[name] else ()
        if without := [grid.name for grid in grids if not grid.has_zero]:
            raise TargetError(
                f"{where}: {name} is pruned by {facts[name]['masked']}, but weights {without[0]} have no zero; "
                "use ternary, or another grid that has one"
            )
    for fact in sorted(step.after):
        if not any(fact in facts[name] for name in names):
            raise TargetError(
                f"{where}: none of the {len(names)} linears it works on is {in_words(fact)} before; "
                "put a pass that does so before it"
            )


def _check_mixed(step: Pass, names: Sequence[str], schemes: Mapping[str, LayerScheme], where: str) -> None:
    """Raise TargetError for pruned or reshaped layers whose columns are not for one input channel alone."""
    for name in (name for name in names if schemes[name].mixes):
        mixed = next(t for t in schemes[name].transforms if transform_class(t.kind).mixes)
        if step.requires.new_shape:
            raise TargetError(
                f"{where}: {name}: {mixed.effect}, so its columns have no channel; put {step.key()} first"
            )
        if own_options(step, name).effects(schemes[name]).sparsities:
            raise TargetError(
                f"{where}: {name}: {mixed.effect}, so zeros are lost when its weight is stored dense; skip the layer "
                "with ignore, or do not rotate its inputs"
            )


def _check_sweep(
    step: Pass, names: Sequence[str], swept: set[str], facts: Mapping[str, Mapping[Fact, str]], where: str
) -> None:
    """Raise TargetError if a pass needs its layers from before compression and nothing compresses them before it.

    swept: the linears of earlier passes of the same sweep. facts: of all linears, of earlier sweeps and runs too.
    """
    if step.requires.original and not swept & set(names) and not any(facts[name] for name in names):
        raise nothing_compressed(where, len(names))
    if step.requires.unquantized and (late := [name for name in names if name not in swept]):
        raise TargetError(
            f"{where}: it needs the weight of {late[0]} before quantization, but no pass right before it quantizes the "
            "layer; put it directly after the quantizing pass, or skip the layer with ignore"
        )


def nothing_compressed(where: str, count: int, hint: str = "") -> TargetError:
    """The error of a pass that compares blocks before and after compression and has nothing to compare."""
    return TargetError(
        f"{where}: it compares blocks before and after compression, but no pass right before it compresses one of "
        f"its {count} linears; put it directly after the passes that compress them{hint}"
    )


def _together(step: Pass, names: Sequence[str], opened: OpenModel) -> list[list[str]]:
    """The linears that a pass meets together: all for a pass over the whole model, or those of each block."""
    if isinstance(step, ModelPass):
        return [list(names)]
    ends = [[end.name] for end in find_ends(opened.model) if end.name in names]
    parts = ends + [[name for name in names if name.startswith(f"{block.name}.")] for block in opened.blocks]
    return [part for part in parts if part]


def _check_trained(
    step: Pass, parts: Sequence[Sequence[str]], schemes: Mapping[str, LayerScheme], format_: Format, where: str
) -> None:
    """Raise TargetError if parameters to train do not exist. schemes: of the layers before the pass."""
    for names in parts if step.requires.trains else ():
        before = [schemes[name] for name in names]
        stored = [format_.adapt(s) or LayerScheme(s.shape) for s in before]
        reason = missing_kind(step.requires.trains, before, stored, format_.name)
        if reason is not None:
            raise TargetError(f"{where}: {reason}")


def _check_prepared(steps: Sequence[Step], shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raise TargetError if no later pass does what a preparation prepared a layer for."""
    for index, (where, step, names) in enumerate(steps):
        rest = [(there, later, frozenset(chosen)) for there, later, chosen in steps[index + 1 :]]
        if step.effects(ANY_LAYER).prepares is None or any(later.requires.new_shape for _, later, _ in rest):
            continue  # a new shape changes the names of layers
        for name in names:
            dense = LayerScheme(shapes[name])
            prepares = own_options(step, name).effects(dense).prepares
            assert prepares is not None, "all layers of a pass are prepared, or none"
            mine = [(there, own_options(later, name)) for there, later, chosen in rest if name in chosen]
            effects = ((there, later.effects(dense)) for there, later in mine)
            there, after = next((pair for pair in effects if prepares.fact in pair[1].facts), ("", None))
            if after is None:
                raise TargetError(f"{where}: {name}: {unprepared(prepares.fact)}, or leave the layer out with ignore")
            if reason := prepares.mismatch(after):
                raise TargetError(f"{where}: {name}: {there} does not do what it is prepared for: {reason}")


def _in_attention(opened: OpenModel, names: Sequence[str], chosen: Sequence[str], where: str) -> list[str]:
    """All linears of the attention modules with a KV cache that contain one of the chosen linears."""
    held = attentions_containing(opened.model, chosen)
    if not held:
        reason = f"none of its {len(chosen)} linears is in an attention module with a KV cache; widen its targets"
        if not attentions_containing(opened.model, names):
            kind = type(opened.model).__name__
            why = "no attention module passes keys and values to one: it is an encoder, or keeps other states"
            reason = f"{kind} has no KV cache ({why}); remove {where.split()[-1]}"
        raise TargetError(f"{where}: {reason}")
    return [name for name in names if any(name.startswith(f"{attention}.") for attention in held)]


def own_options(step: Pass, name: str) -> Pass:
    """The pass with its options for one of its layers."""
    return step.for_layer(name) or step


def _check_layers(
    step: Pass, names: Sequence[str], schemes: dict[str, LayerScheme], format_: Format, where: str
) -> None:
    """Raise TargetError if a pass cannot work on a layer, or the format cannot store the result.

    schemes: the storage schemes of layers before the step; they are updated to those after it. Rounded inputs that a
    preparation gives to a dense layer are stored with the codes of a later pass, and checked there.
    """
    survey = step.survey()
    alternatives = () if survey is None else survey.alternatives
    for name in names:
        before, mine = schemes[name], own_options(step, name)
        schemes[name] = mine.effects(before).scheme
        for own in (mine, *(alternatives if mine is step else ())):
            effects = own.effects(before)
            after, reason = effects.scheme, own.effects(LayerScheme(before.shape)).refusal
            prepares_codes = effects.prepares is not None and effects.prepares.fact == "quantized"
            awaits_codes = prepares_codes and after.folds and after.maps_inputs is None
            if reason is None and after != before and not awaits_codes:
                reason = format_.refuses(after)
            if reason is not None:
                raise TargetError(f"{where}: {name}: {reason}")


def _check_transforms(
    step: Pass, names: Sequence[str], most: dict[str, LayerScheme], format_: Format, where: str
) -> None:
    """Raise TargetError if a transform may stay at a layer with which the format cannot store it.

    most: the schemes of layers with all transforms that may stay (`Effects.largest_scheme`); they are updated.
    """
    for name in names:
        own = own_options(step, name)
        after = most[name] = own.effects(most[name]).largest_scheme
        reason = None if after.folds else format_.refuses(after)
        if reason is not None and format_.refuses(own.effects(LayerScheme(after.shape)).scheme) is None:
            raise TargetError(f"{where}: {name}: it may be that {reason}")


def layer_shapes(opened: OpenModel) -> dict[str, tuple[int, int]]:
    """The shape (out, in) of every linear in the blocks, and of the ends, by full name."""
    found = {
        f"{block.name}.{name}": shape_of(module)
        for block in opened.blocks
        for name, module in linears(block.module).items()
    }
    return found | {end.name: end_layer(opened.model, end).shape for end in find_ends(opened.model)}


def lm_objective_for(steps: Sequence[Step], opened: OpenModel, seed: int = 0) -> ModelKind:
    """Return `Run.lm_objective`. The tokenizer needs a mask token only if a pass uses the objective.

    Raises ModelError for a missing mask token; RecipeError for options that have no effect on the objective.
    """
    users = [(where, step) for where, step, _ in steps if isinstance(step, ModelPass) and step.requires.objective]
    found = objective_of(opened.model, opened.tokenizer, seed) if users else CAUSAL
    for where, step in users:
        step.adapt_objective(found, where)
    return found


def teachers(
    passes: Sequence[Pass], model: PreTrainedModel, teacher: PreTrainedModel | None, opened: OpenModel
) -> Callable[[str | None], AbstractContextManager[nn.Module]]:
    """Return `Run.open_teacher` for a model in memory. It opens `teacher`, or a copy of the model if a pass needs one.

    Raises ModelError for a teacher with another vocabulary, or of another kind.
    """
    sources = {step.requires.teacher for step in passes}
    for source in sorted(source for source in sources if isinstance(source, str)):
        check_teacher(source, opened, trust_remote_code=False)
    known = copy.deepcopy(model) if teacher is None and True in sources else teacher
    if known is not None:
        check_supported(known, "teacher")
        check_kind("it", known, model)
        there, here = (text_config(each.config).vocab_size for each in (known, model))
        if there != here:
            sizes = f"it has a vocabulary of {there} tokens, the model of {here}"
            raise ModelError(f"teacher: {sizes}; use a teacher with the model's vocabulary")

    def open_teacher(other: str | None) -> AbstractContextManager[nn.Module]:
        if other is not None:
            return open_model(other, device=opened.device, masks="forget").streaming()
        assert known is not None
        return nullcontext(known.eval())

    return open_teacher
