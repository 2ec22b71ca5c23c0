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

from compress.blockwise.capture import ModelShell
from compress.blockwise.quantized_embeddings import embeddings_of
from compress.checkpoint.formats.base import Format
from compress.checkpoint.formats.gguf_files.importance import LayerImportance
from compress.checkpoint.opened import OpenModel, Weights
from compress.checkpoint.opening import open_model
from compress.checkpoint.sources.supported import check_supported
from compress.checkpoint.sources.vocabulary import check_kind, check_teacher, with_vocabulary_of
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
from compress.passes.contract.passes import ModelPass, Pass, Step, calibrates, chosen_linears, works_on
from compress.passes.contract.problems import Problems
from compress.pipeline.defaults import with_fitting_groups, with_fitting_texts
from compress.pipeline.ends import check_ends
from compress.pipeline.texts import check_texts, suited, texts_of, with_divided_texts
from compress.recipe.order import in_words, label, unprepared
from compress.recipe.schema import Recipe
from compress.train.student import check_trained, norms_of

BEFORE = "in the model that the passes start with"
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
        fitted: Notes on how the recipe was fitted to the model: defaults, and what the evaluation leaves out.
        target_bytes: The size of the complete checkpoint that the recipe asks for, or None.
    """

    recipe: Recipe
    opened: OpenModel
    steps: tuple[Step, ...]
    form: OpenModel
    storage: torch.dtype
    format: Format
    objective: ModelKind
    sample: Batch
    fitted: tuple[str, ...] = ()
    target_bytes: int | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shape (out, in) of every linear before and after the passes, by full name."""
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
    problems = Problems()
    problems.attempt(check_model, format_, opened)
    passes = problems.attempt(
        with_fitting_groups, recipe.passes, lambda passes: resolve_passes(passes, opened, format_)
    )
    if passes is None:
        for index, step in enumerate(recipe.passes):
            problems.attempt(_check_patterns, step, opened, label(index, step))
    evaluation = problems.attempt(suited, recipe.eval, opened.model)
    objective = None if passes is None else problems.attempt(lm_objective_for, passes[1][0], opened, recipe.seed)
    problems.check()
    assert passes is not None and evaluation is not None and objective is not None
    (fitted_passes, (steps, form), group_notes), (settings, left_out) = passes, evaluation
    recipe = recipe.model_copy(update={"passes": tuple(fitted_passes), "eval": settings})
    recipe = with_divided_texts(recipe, opened.model) if calibrates(steps) else recipe
    recipe, text_notes = with_fitting_texts(recipe, opened.model, texts_of(recipe.eval, opened.model))
    notes = *left_out, *text_notes, *group_notes
    return ResolvedRecipe(recipe, opened, tuple(steps), form, storage, format_, objective, sample, notes)


def _check_patterns(step: Pass, opened: OpenModel, pass_label: str) -> None:
    modules = ModuleNames.of(opened.model, opened.blocks)
    chosen_linears(step.on_model(modules, pass_label), modules.candidates(step.targets), pass_label)


def resolve_and_check(recipe: Recipe, opened: OpenModel) -> ResolvedRecipe:
    """Resolve a recipe on a model; if that fails, check the texts, too, to report all mistakes at once.

    Raises:
        UserError: as `resolve`.
        SeveralErrors: if there are several mistakes.
    """
    problems = Problems()
    resolved = problems.attempt(resolve, recipe, opened)
    if resolved is None:
        problems.attempt(_check_fitted_texts, recipe, opened)
    problems.check()
    assert resolved is not None
    return resolved


def _check_fitted_texts(recipe: Recipe, opened: OpenModel) -> None:
    fitted, _ = with_fitting_texts(recipe, opened.model, texts_of(recipe.eval, opened.model))
    check_texts(fitted, opened)


def check_model(format_: Format, opened: OpenModel) -> None:
    """Raise ModelError for a model that a format cannot store."""
    if reason := format_.refuses_model(embeddings_of(opened)):
        raise ModelError(f"save: format {format_.name}: {reason}; use another format, such as native")


def run_of(resolved: ResolvedRecipe, journal: Journal, **services: Any) -> Run:
    """Return the run of a recipe.

    Args:
        services: the other attributes of `Run`: calibration, teachers, processes, ...
    """
    recipe, objective = resolved.recipe, resolved.objective
    stored = recipe.seed, resolved.format, recipe.save.sparse
    own = {"source_codes": resolved.opened.weights.source_codes, "importance": importance_of(resolved)}
    own |= {"all_experts": recipe.calibration.experts == "all", "expert_tokens": recipe.calibration.expert_tokens}
    services = own | services
    return Run(resolved.opened.device, resolved.storage, *stored, journal, lm_objective=objective, **services)


def importance_of(resolved: ResolvedRecipe) -> LayerImportance:
    """Return what reads the importance of the inputs of layers from files."""
    return LayerImportance(text_config(resolved.opened.config))


def resolve_passes(
    passes: Sequence[Pass], opened: OpenModel, format_: Format, start: int = 0
) -> tuple[list[Step], OpenModel]:
    """Return every pass with its linears, and the model after the last pass, without weights if its shape changes.

    Args:
        start: The index of the first of these passes in the recipe.

    Raises:
        TargetError: A pattern matches nothing, a later pass cannot work on a layer after an earlier pass, no later pass
            does what a layer was prepared for, a layer or the format does not support a group size, or the model cannot
            have a shape.
    """
    names, facts, schemes = opened.linear_names(), _facts(opened), schemes_of(opened)
    _check_start(schemes, format_)
    most = dict(schemes)
    steps: list[Step] = []
    swept: set[str] = set()
    for index, step in enumerate(passes, start):
        pass_label, needs = label(index, step), step.requires
        _check_stacks(step, opened, pass_label)
        modules = ModuleNames.of(opened.model, opened.blocks)
        ends, candidates = modules.reached(step.targets), modules.candidates(step.targets)
        step = step.on_model(modules, pass_label)
        chosen = chosen_linears(step, candidates, pass_label)
        chosen = [name for name in chosen if name not in {end.embedding for end in ends if end.head is not None}]
        if "quantized" in step.effects(ANY_LAYER).facts:
            chosen = _without_dense(chosen, format_, pass_label)
        check_ends(step, [end for end in ends if end.name in chosen], pass_label)
        if step.effects(ANY_LAYER).cache is not None:
            chosen = _in_attention(opened, names, chosen, pass_label)
        _check_facts(step, list(facts) if needs.new_shape else chosen, facts, pass_label)
        _check_sweep(step, chosen, swept, facts, pass_label)
        swept = set() if isinstance(step, ModelPass) else swept | set(chosen)
        _check_mixed(step, list(schemes) if needs.new_shape else chosen, schemes, pass_label)
        _check_trained(step, chosen, opened, schemes, format_, pass_label)
        _check_layers(step, chosen, schemes, format_, pass_label)
        _check_transforms(step, chosen, most, format_, pass_label)
        steps.append((pass_label, step, chosen))
        if isinstance(step, ModelPass) and needs.new_shape:
            opened = with_config(opened, step.outcome(opened.model, pass_label))
            names, facts, schemes = opened.linear_names(), _facts(opened), schemes_of(opened)
            schemes |= {n: own_options(step, n).effects(schemes[n]).scheme for n in chosen if n in schemes}
            most = dict(schemes)
        else:
            for name in chosen:
                facts[name] |= dict.fromkeys(own_options(step, name).effects(ANY_LAYER).facts, f"by {pass_label}")
    _check_prepared(steps, {name: scheme.shape for name, scheme in schemes.items()})
    return steps, opened


def _without_dense(chosen: Sequence[str], format_: Format, pass_label: str) -> list[str]:
    """Leave out the linears that the format never stores as codes. Raises TargetError if it is all of them."""
    reasons = {name: format_.stores_dense(name) for name in chosen}
    if chosen and all(reasons.values()):
        raise TargetError(
            f"{pass_label}: format {format_.name} cannot store {chosen[0]} as codes: {reasons[chosen[0]]}"
        )
    return [name for name in chosen if reasons[name] is None]


def with_config(opened: OpenModel, config: PretrainedConfig) -> OpenModel:
    """The model of another configuration, without weights. Raises ModelError if transformers cannot build it."""
    model = sketch(opened.model, config)
    if model is None:
        raise ModelError(f"model: transformers {transformers.__version__} cannot build it from its configuration")
    weights = Weights(reading=opened.weights.reading)
    return replace(opened, model=model, blocks=find_blocks(model), weights=weights, undeclared={})


def update_targets(steps: Sequence[Step], opened: OpenModel, format_: Format, count: int) -> None:
    """Update the linears of all steps after the first `count` to those of the model in its new shape."""
    remaining = [step for _, step, _ in steps[count:]]
    updated, _ = resolve_passes(remaining, opened, format_, count)
    for (_, _, names), (_, _, new_names) in zip(steps[count:], updated, strict=True):
        names[:] = new_names


def _facts(opened: OpenModel) -> dict[str, dict[Fact, str]]:
    """Return the facts of every linear of the original model, each with its origin."""
    ends = [end.name for end in find_ends(opened.model)]
    facts: dict[str, dict[Fact, str]] = {name: {} for name in [*opened.linear_names(), *ends]}
    for name in facts:
        layer = layer_of(opened.model.get_submodule(name)) if name in ends else opened.model.get_submodule(name)
        if isinstance(layer, CompressedLinear):
            true: dict[Fact, bool] = {
                "masked": layer.positions is not None,
                "quantized": layer.quantized,
                "activations_quantized": layer.rounding is not None,
            }
            facts[name] = {fact: BEFORE for fact, holds in true.items() if holds}
    attentions = tuple(f"{attention}." for attention in cache_policies(opened.model))
    for name in facts:
        if name.startswith(attentions):
            facts[name]["cache_quantized"] = BEFORE
    return facts


def schemes_of(opened: OpenModel) -> dict[str, LayerScheme]:
    """Return the storage scheme of every linear in the blocks, and of the ends, of the original model."""
    schemes = {
        f"{block.name}.{name}": scheme_of(module)
        for block in opened.blocks
        for name, module in linears(block.module).items()
    }
    return schemes | {end.name: end_layer(opened.model, end).scheme for end in find_ends(opened.model)}


def _check_stacks(step: Pass, opened: OpenModel, pass_label: str) -> None:
    """Raise TargetError if a pass knows one stack of blocks only, and the model has two."""
    does = "changes the shape of a model" if step.requires.new_shape else "quantizes the KV cache of a model"
    if opened.blocks[-1].stack and (step.requires.new_shape or step.effects(ANY_LAYER).cache is not None):
        raise TargetError(
            f"{pass_label}: it {does} with one stack of blocks, but {type(opened.model).__name__} has two, those of an "
            f"encoder and of a decoder; remove {step.key()}"
        )


def _check_start(schemes: dict[str, LayerScheme], format_: Format) -> None:
    """Raise TargetError if the format cannot store a linear as it is before the first pass."""
    for name, scheme in schemes.items():
        stored = scheme if format_.sparse else scheme.folded(keep_zeros=False)
        reason = None if stored.plain else format_.refuses(stored)
        if reason is not None:
            raise TargetError(f"model: {name} is compressed already: {reason}")


def _check_facts(step: Pass, names: Sequence[str], facts: dict[str, dict[Fact, str]], pass_label: str) -> None:
    for fact in sorted(step.never_after):
        for name in names:
            if fact in facts[name]:
                origin, again = facts[name][fact], fact in step.effects(ANY_LAYER).facts
                remedy = "skip it with ignore" + ("" if again else f", or put {step.key()} first")
                if origin == BEFORE:
                    remedy = "start with the model from before that, or skip it with ignore"
                    if fact == "quantized":
                        remedy += "; compress export FOLDER --format dense writes its dequantized weights"
                    remedy += "; masks: forget drops the zeros of a dense model" if fact == "masked" else ""
                raise TargetError(f"{pass_label}: {name} is already {in_words(fact)} {origin}; {remedy}")
    for name in names:
        grids = own_options(step, name).effects(ANY_LAYER).scheme.grids if "masked" in facts[name] else ()
        if without := [grid.name for grid in grids if not grid.has_zero]:
            raise TargetError(
                f"{pass_label}: {name} is pruned {facts[name]['masked']}, but weights {without[0]} have no zero; "
                "use ternary, or another grid that has one"
            )
    for fact in sorted(step.after):
        if not any(fact in facts[name] for name in names):
            raise TargetError(
                f"{pass_label}: none of the {len(names)} linears it works on is {in_words(fact)} before; "
                "put a pass that does so before it"
            )


def _check_mixed(step: Pass, names: Sequence[str], schemes: Mapping[str, LayerScheme], pass_label: str) -> None:
    """Raise TargetError for pruned or reshaped layers whose columns are not for one input channel alone."""
    for name in (name for name in names if schemes[name].mixes):
        mixed = next(t for t in schemes[name].transforms if transform_class(t.kind).mixes)
        if step.requires.new_shape:
            raise TargetError(
                f"{pass_label}: {name}: {mixed.effect}, so its columns have no channel; put {step.key()} first"
            )
        if own_options(step, name).effects(schemes[name]).sparsities:
            raise TargetError(
                f"{pass_label}: {name}: {mixed.effect}, so zeros are lost when its weight is stored dense; skip the "
                "layer with ignore, or do not rotate its inputs"
            )


def _check_sweep(
    step: Pass, names: Sequence[str], swept: set[str], facts: Mapping[str, Mapping[Fact, str]], pass_label: str
) -> None:
    """Raise TargetError if a pass needs its layers from before compression and nothing compresses them before it.

    swept: the linears of earlier passes of the same sweep. facts: of all linears, of earlier sweeps and runs too.
    """
    if step.requires.original and not swept & set(names) and not any(facts[name] for name in names):
        raise nothing_compressed(pass_label, len(names))
    if step.requires.unquantized and (late := [name for name in names if name not in swept]):
        raise TargetError(
            f"{pass_label}: it needs the weight of {late[0]} before quantization, but no pass right before it "
            "quantizes the layer; put it directly after the quantizing pass, or skip the layer with ignore"
        )


def nothing_compressed(pass_label: str, count: int, hint: str = "") -> TargetError:
    """Return the error of a pass that compares blocks before and after compression and has nothing to compare."""
    return TargetError(
        f"{pass_label}: it compares blocks before and after compression, but no pass right before it compresses one of "
        f"its {count} linears; put it directly after the passes that compress them{hint}"
    )


def _check_trained(
    step: Pass,
    names: Sequence[str],
    opened: OpenModel,
    schemes: Mapping[str, LayerScheme],
    format_: Format,
    pass_label: str,
) -> None:
    """Raise TargetError if parameters to train do not exist. schemes: of the layers before the pass."""
    if not (step.requires.trains or step.requires.training):
        return
    if isinstance(step, ModelPass):
        modules: dict[str, nn.Module] = {"": opened.model}
    else:
        modules = {block.name: block.module for block in opened.blocks}
    for root, module in modules.items():
        prefix = f"{root}." if root else ""
        inside = [name for name in names if name.startswith(prefix)]
        if not inside:
            continue
        starts = [schemes[name] for name in inside]
        ends = [own_options(step, name).effects(schemes[name]).scheme for name in inside]
        stored = [format_.adapt(scheme) or LayerScheme(scheme.shape) for scheme in starts]
        learns_scales = any(e.free_scales and not s.quantized for s, e in zip(starts, ends, strict=True))
        exists = {
            "scales": learns_scales or any(scheme.free_scales for scheme in stored),
            "norms": any(works_on(step, prefix + name.rpartition(".")[0]) for name in norms_of(module)),
            "weights": not all(scheme.quantized for scheme in stored),
            "biases": any(getattr(opened.model.get_submodule(name), "bias", None) is not None for name in inside),
        }
        available = [kind for kind in exists if exists[kind]]
        if "scales" in step.requires.trains and not exists["scales"] and any(s.free_scales for s in starts):
            raise TargetError(
                f"{pass_label}: save.format {format_.name} stores no scales; use save: {{format: compressed-tensors}}, "
                f"or train: [{', '.join(available)}]"
            )
        place = f"{pass_label} {root}".strip()
        check_trained(step.requires.trains, available, place, step.requires.weights_option)


def _check_prepared(steps: Sequence[Step], shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raise TargetError if no later pass does what a preparation prepared a layer for."""
    for index, (pass_label, step, names) in enumerate(steps):
        later_steps = [(later_label, later, frozenset(chosen)) for later_label, later, chosen in steps[index + 1 :]]
        if step.effects(ANY_LAYER).prepares is None or any(later.requires.new_shape for _, later, _ in later_steps):
            continue  # a new shape changes the names of layers
        for name in names:
            dense = LayerScheme(shapes[name])
            prepares = own_options(step, name).effects(dense).prepares
            assert prepares is not None, "all layers of a pass are prepared, or none"
            mine = [
                (later_label, own_options(later, name)) for later_label, later, chosen in later_steps if name in chosen
            ]
            effects = ((later_label, later.effects(dense)) for later_label, later in mine)
            later_label, later_effects = next((pair for pair in effects if prepares.fact in pair[1].facts), ("", None))
            if later_effects is None:
                reason = f"{unprepared(prepares)}, or leave the layer out with ignore"
                raise TargetError(f"{pass_label}: {name}: {reason}")
            if reason := prepares.mismatch(later_effects):
                raise TargetError(f"{pass_label}: {name}: {later_label} does not do what it is prepared for: {reason}")


def _in_attention(opened: OpenModel, names: Sequence[str], chosen: Sequence[str], pass_label: str) -> list[str]:
    """Return all linears of the attention modules with a KV cache that contain one of the chosen linears."""
    attentions = attentions_containing(opened.model, chosen)
    if not attentions:
        reason = f"none of its {len(chosen)} linears is in an attention module with a KV cache; widen its targets"
        if not attentions_containing(opened.model, names):
            kind = type(opened.model).__name__
            why = "no attention module passes keys and values to one: it is an encoder, or keeps other states"
            reason = f"{kind} has no KV cache ({why}); remove {pass_label.split()[-1]}"
        raise TargetError(f"{pass_label}: {reason}")
    return [name for name in names if any(name.startswith(f"{attention}.") for attention in attentions)]


def own_options(step: Pass, name: str) -> Pass:
    """The pass with its options for one of its layers."""
    return step.for_layer(name) or step


def _check_layers(
    step: Pass, names: Sequence[str], schemes: dict[str, LayerScheme], format_: Format, pass_label: str
) -> None:
    """Raise TargetError if a pass cannot work on a layer, or the format cannot store the result.

    schemes: the storage schemes of layers before the step; they are updated to those after it. Rounded inputs that a
    preparation gives to a dense layer are stored with the codes of a later pass, and checked there.
    """
    survey = step.survey()
    for name in names:
        scheme, mine = schemes[name], own_options(step, name)
        schemes[name] = mine.effects(scheme).scheme
        alternatives = () if survey is None or mine is not step else survey.alternatives(scheme.shape)
        for variant in (mine, *alternatives):
            effects = variant.effects(scheme)
            new_scheme, reason = effects.scheme, variant.effects(LayerScheme(scheme.shape)).refusal
            prepares_codes = effects.prepares is not None and effects.prepares.fact == "quantized"
            awaits_codes = prepares_codes and new_scheme.folds and new_scheme.maps_inputs is None
            if reason is None and new_scheme != scheme and not awaits_codes:
                reason = format_.refuses(new_scheme)
            if reason is not None:
                raise TargetError(f"{pass_label}: {name}: {reason}")


def _check_transforms(
    step: Pass, names: Sequence[str], most: dict[str, LayerScheme], format_: Format, pass_label: str
) -> None:
    """Raise TargetError if a transform may stay at a layer with which the format cannot store it.

    most: the schemes of layers with all transforms that may stay (`Effects.largest_scheme`); they are updated.
    """
    for name in names:
        layer_step = own_options(step, name)
        scheme = most[name] = layer_step.effects(most[name]).largest_scheme
        reason = None if scheme.folds else format_.refuses(scheme)
        if reason is not None and format_.refuses(layer_step.effects(LayerScheme(scheme.shape)).scheme) is None:
            raise TargetError(f"{pass_label}: {name}: it may be that {reason}")


def layer_shapes(opened: OpenModel) -> dict[str, tuple[int, int]]:
    """Return the shape (out, in) of every linear in the blocks, and of the ends, by full name."""
    shapes = {
        f"{block.name}.{name}": shape_of(module)
        for block in opened.blocks
        for name, module in linears(block.module).items()
    }
    return shapes | {end.name: end_layer(opened.model, end).shape for end in find_ends(opened.model)}


def lm_objective_for(steps: Sequence[Step], opened: OpenModel, seed: int = 0) -> ModelKind:
    """Return `Run.lm_objective`. The tokenizer needs a mask token only if a pass uses the objective.

    Raises ModelError for a missing mask token; RecipeError for options that have no effect on the objective.
    """
    users = [
        (pass_label, step) for pass_label, step, _ in steps if isinstance(step, ModelPass) and step.requires.objective
    ]
    objective = objective_of(opened.model, opened.tokenizer, seed) if users else CAUSAL
    for pass_label, step in users:
        step.adapt_objective(objective, pass_label)
    return objective


def teachers(
    passes: Sequence[Pass], model: PreTrainedModel, teacher: PreTrainedModel | None, opened: OpenModel
) -> Callable[[str | None], AbstractContextManager[nn.Module]]:
    """Return `Run.open_teacher` for a model in memory. It opens `teacher`, or a copy of the model if a pass needs one.

    Raises ModelError for a teacher with another vocabulary, or of another kind.
    """
    sources = {step.requires.teacher for step in passes}
    for source in sorted(source for source in sources if isinstance(source, str)):
        check_teacher(source, opened, trust_remote_code=False)
    default_teacher = copy.deepcopy(model) if teacher is None and True in sources else teacher
    if default_teacher is not None:
        check_supported(default_teacher, "teacher")
        check_kind("it", default_teacher, model)
        teacher_vocabulary, model_vocabulary = (
            text_config(network.config).vocab_size for network in (default_teacher, model)
        )
        if teacher_vocabulary != model_vocabulary:
            sizes = f"it has a vocabulary of {teacher_vocabulary} tokens, the model of {model_vocabulary}"
            raise ModelError(f"teacher: {sizes}; use a teacher with the model's vocabulary")

    def open_teacher(source_name: str | None) -> AbstractContextManager[nn.Module]:
        if source_name is not None:
            teacher = open_model(source_name, device=opened.device, masks="forget").streaming()
            return with_vocabulary_of(model.config, teacher)
        assert default_teacher is not None
        return nullcontext(default_teacher.eval())

    return open_teacher
