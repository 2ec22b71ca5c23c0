"""Resolve a recipe on a model: targets, facts, shapes, texts, teachers. All mistakes are found before the run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.api.facts import Fact, LayerFacts
from compress.api.passes import ModelPass, Pass, Step
from compress.data.ids import model_ids, needs_tokenizer
from compress.data.self_sampling import self_sampled
from compress.errors import ModelError, TargetError
from compress.formats.base import Format
from compress.model.kv_cache import attentions_containing, rounded_caches
from compress.model.linear import CompressedLinear, linears
from compress.model.objective import NEXT_TOKENS, LMObjective, objective_of
from compress.model.open.opening import InMemory, OpenModel, open_model
from compress.model.open.vocabulary import check_kind, check_teacher
from compress.model.reshape.reconfigure import sketch
from compress.model.structure.blocks import find_blocks
from compress.numerics.dtypes import DTYPES
from compress.recipe.order import in_words, label
from compress.recipe.schema import Recipe
from compress.weights.layer import LayerScheme


def storage_dtype(recipe: Recipe, opened: OpenModel) -> torch.dtype:
    """The dtype of stored scales and dense tensors."""
    return opened.dtype if recipe.save.dtype == "auto" else DTYPES[recipe.save.dtype]


def resolve(passes: Sequence[Pass], opened: OpenModel, format_: Format, first: int = 0) -> tuple[list[Step], OpenModel]:
    """Return every pass with its linears, and the model after the last pass, without weights if its shape changes.

    first: the index of the first of these passes in the recipe.

    Raises TargetError: a pattern matches nothing, a later pass cannot work on a layer after an earlier pass, a layer or
    the format does not support a group size, or the model cannot have a shape.
    """
    names, facts, schemes = opened.linear_names(), _facts(opened), _schemes(opened)
    steps: list[Step] = []
    swept: set[str] = set()
    for index, step in enumerate(passes, first):
        where, needs = label(index, step), step.requires
        chosen = step.choose(names, where)
        if step.cache is not None:
            chosen = _in_attention(opened, names, chosen, where)
        _check_facts(step, names if needs.new_shape else chosen, facts, where)
        _check_sweep(step, chosen, swept, where)
        swept = set() if isinstance(step, ModelPass) else swept | set(chosen)
        _check_layers(step, chosen, schemes, format_, where)
        steps.append((where, step, chosen))
        if isinstance(step, ModelPass) and needs.new_shape:
            opened = with_config(opened, step.outcome(opened.model, where))
            names, facts, schemes = opened.linear_names(), _facts(opened), _schemes(opened)
        else:
            for name in chosen:
                facts[name] |= dict.fromkeys(own_options(step, name).facts(), where)
    return steps, opened


def with_config(opened: OpenModel, config: PretrainedConfig) -> OpenModel:
    """The model of another configuration, without weights. Raises ModelError if transformers cannot build it."""
    model = sketch(opened.model, config)
    if model is None:
        raise ModelError(f"model: transformers {transformers.__version__} cannot build it from its configuration")
    return replace(opened, model=model, blocks=find_blocks(model), weights=InMemory())


def update_targets(steps: Sequence[Step], opened: OpenModel, format_: Format, done: int) -> None:
    """Update the linears of all steps after the first `done` to those of the model in its new shape."""
    rest = [step for _, step, _ in steps[done:]]
    found, _ = resolve(rest, opened, format_, done)
    for (_, _, names), (_, _, now) in zip(steps[done:], found, strict=True):
        names[:] = now


def _facts(opened: OpenModel) -> dict[str, dict[Fact, str]]:
    """The facts of every linear of the original model, each with its origin."""
    found: dict[str, dict[Fact, str]] = {name: {} for name in opened.linear_names()}
    for name in found:
        layer = opened.model.get_submodule(name)
        if isinstance(layer, CompressedLinear):
            true: dict[Fact, bool] = {
                "masked": layer.mask is not None,
                "quantized": layer.quantized,
                "activations_quantized": layer.rounding is not None,
            }
            found[name] = {fact: "earlier passes" for fact, holds in true.items() if holds}
    rounded = tuple(f"{attention}." for attention in rounded_caches(opened.model))
    for name in found:
        if name.startswith(rounded):
            found[name]["cache_quantized"] = "earlier passes"
    return found


def _schemes(opened: OpenModel) -> dict[str, LayerScheme]:
    """The storage scheme of every linear of the original model."""
    return {
        f"{block.name}.{name}": CompressedLinear.of(module).scheme
        for block in opened.blocks
        for name, module in linears(block.module).items()
    }


def _check_facts(step: Pass, names: Sequence[str], facts: dict[str, dict[Fact, str]], where: str) -> None:
    for fact in sorted(step.never_after):
        for name in names:
            if fact in facts[name]:
                raise TargetError(
                    f"{where}: {name} is {in_words(fact)} by {facts[name][fact]} already; "
                    f"leave it out with ignore, or put {step.key()} first"
                )
    for name in names:
        grids = own_options(step, name).becomes(LayerScheme((1, 1))).grids if "masked" in facts[name] else ()
        if without := [grid.name for grid in grids if not grid.has_zero]:
            raise TargetError(
                f"{where}: {name} is pruned by {facts[name]['masked']}, but weights {without[0]} have no zero; "
                "use ternary, or another grid that has one"
            )
    for fact in sorted(step.after):
        if not any(fact in facts[name] for name in names):
            raise TargetError(f"{where}: none of the {len(names)} linears it works on is {in_words(fact)} before")


def _check_sweep(step: Pass, names: Sequence[str], swept: set[str], where: str) -> None:
    """Raise TargetError if a pass needs the original layers of the sweep and no pass of the sweep changes them.

    swept: the linears of earlier passes of the same sweep.
    """
    if step.requires.original and not swept & set(names):
        raise TargetError(
            f"{where}: it reconstructs the outputs of blocks before the earlier passes of its sweep, but none of "
            f"these passes works on its {len(names)} linears; put it right after the passes that compress them"
        )
    if step.requires.unquantized and (late := [name for name in names if name not in swept]):
        raise TargetError(
            f"{where}: it needs the weight of {late[0]} before quantization, but no earlier pass of the same sweep "
            "quantizes the layer; put it right after that pass, or leave the layer out (ignore)"
        )


def _in_attention(opened: OpenModel, names: Sequence[str], chosen: Sequence[str], where: str) -> list[str]:
    """All linears of the attention modules with a KV cache that contain one of the chosen linears."""
    held = attentions_containing(opened.model, chosen)
    if not held:
        reason = f"none of its {len(chosen)} linears is in an attention module with a cache; widen its targets"
        if not attentions_containing(opened.model, names):
            kind = type(opened.model).__name__
            reason = f"{kind} has no cache: an encoder sees the whole text at once; leave {where.split()[-1]} out"
        raise TargetError(f"{where}: it rounds the keys and values of a KV cache; {reason}")
    return [name for name in names if any(name.startswith(f"{attention}.") for attention in held)]


def own_options(step: Pass, name: str) -> Pass:
    """The pass with its options for one of its layers."""
    return step.for_layer(name) or step


def _check_layers(
    step: Pass, names: Sequence[str], schemes: dict[str, LayerScheme], format_: Format, where: str
) -> None:  # fmt: skip
    """Raise TargetError if a pass cannot work on a layer, or the format cannot store the result.

    schemes: the storage schemes of layers before the step; they are updated to those after it.
    """
    for name in names:
        own, before = own_options(step, name), schemes[name]
        after = schemes[name] = own.becomes(before)
        reason = own.check(LayerFacts(name, before.shape))
        if reason is None and after != before:
            reason = format_.refuses(after)
        if reason is not None:
            raise TargetError(f"{where}: {name}: {reason}")


def layer_shapes(opened: OpenModel) -> dict[str, tuple[int, int]]:
    """The shape (out, in) of every linear in the blocks, by full name."""
    return {
        f"{block.name}.{name}": CompressedLinear.of(module).shape
        for block in opened.blocks
        for name, module in linears(block.module).items()
    }


def lm_objective_for(steps: Sequence[Step], opened: OpenModel, seed: int = 0) -> LMObjective:
    """Return `Run.lm_objective`. The tokenizer needs a mask token only if a pass uses the objective.

    Raises ModelError for a missing mask token; RecipeError for options that have no effect on the objective.
    """
    users = [(where, step) for where, step, _ in steps if isinstance(step, ModelPass) and step.requires.objective]
    found = objective_of(opened.model, opened.tokenizer, seed) if users else NEXT_TOKENS
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
        check_kind("it", type(known), known.config, opened)
    if known is not None and known.config.vocab_size != model.config.vocab_size:
        sizes = f"it has a vocabulary of {known.config.vocab_size} tokens, the model of {model.config.vocab_size}"
        raise ModelError(f"teacher: {sizes}; use a teacher with the model's vocabulary")

    def open_teacher(other: str | None) -> AbstractContextManager[nn.Module]:
        if other is not None:
            return open_model(other, device=opened.device).streaming()
        assert known is not None
        return nullcontext(known.eval())

    return open_teacher


def calibration_ids(recipe: Recipe, opened: OpenModel) -> Tensor:
    """The recipe's calibration token ids, [sequences, length].

    Raises CalibrationError: the text is missing or too short, ids exceed the vocabulary, or there is no tokenizer.
    """
    wanted = recipe.calibration
    if wanted.source == "self":
        with opened.streaming() as model:
            count, length = wanted.sequences or 64, wanted.length or 512
            tokenizer = needs_tokenizer(opened.tokenizer, "calibration")
            return self_sampled(model, tokenizer, count, length, recipe.seed)
    shape = wanted.sequences, wanted.length
    return model_ids(opened.model, opened.tokenizer, wanted.source, "calibration", *shape, recipe.seed)


def eval_ids(recipe: Recipe, opened: OpenModel) -> dict[str, Tensor]:
    """Token ids of every evaluation text, [windows, length], by its name; empty for `eval: null`."""
    wanted = recipe.eval
    if wanted is None:
        return {}
    where, shape = (opened.model, opened.tokenizer), (wanted.windows, wanted.length)
    return {source: model_ids(*where, source, "test", *shape, recipe.seed) for source in wanted.perplexity}
