"""Whether transformers can load a checkpoint, which the plan asks before the run and the verification after it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers import base as quantizers

from compress.checkpoint.caches import stated_policy
from compress.checkpoint.formats.base import Format, StoredLayer
from compress.layers.linear import CompressedLinear, linears
from compress.layers.scheme import LayerScheme
from compress.models.caches.attentions import cache_policies
from compress.models.experts import Experts
from compress.pipeline.model_facts import ModelFacts, planned_policies
from compress.pipeline.resolve import ResolvedRecipe
from compress.recipe.schema import Recipe

OWN = "save: {verify: own} checks it with compress.load alone"
UNVERIFIED = "save: not verified with transformers: "
"""The beginning of the note of a plan whose checkpoint transformers cannot verify."""


def not_asked(recipe: Recipe, config: PretrainedConfig) -> str | None:
    """Return why transformers is not asked to load a checkpoint of the recipe, or None; config: of the model."""
    if reason := recipe.save.target().unverified:
        return reason
    if recipe.save.verify == "own":
        return "the recipe says verify: own"
    return recipe.save.target().misread(config)


def unreadable(
    format_: Format, model: nn.Module, schemes: Mapping[str, LayerScheme], dtype: torch.dtype, stated: bool
) -> str | None:
    """Return why transformers cannot load a checkpoint of a model, or None.

    Args:
        format_: format of the checkpoint.
        schemes: stored schemes of linears by full name; others are dense.
        dtype: dtype of loading.
        stated: whether the format states the cache policy.
    """
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    if not format_.stacked and not all(module.named for module in experts):
        return "transformers has no name for each single expert of this model"
    if not stated and all(scheme.plain for scheme in schemes.values()):
        return None
    if exchanged := _exchanged(model, format_.quant_method):
        return f"transformers builds {exchanged} of a quantized model from other linears, with other names"
    inside = {id(module) for expert in experts for module in linears(expert).values()}
    layers, needs_weight = [], _needs_weight(model, {name for name, scheme in schemes.items() if not scheme.plain})
    for name, module in linears(model).items():
        layer = CompressedLinear.of(module)
        scheme = schemes.get(name, LayerScheme(layer.shape))
        overrides_forward = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
        layers.append(StoredLayer(scheme, layer.transposed, id(module) in inside, needs_weight, overrides_forward))
    return format_.unreadable(layers, dtype)


def _exchanged(model: nn.Module, method: str | None) -> str | None:
    """Return the name of a module that transformers exchanges when it loads a checkpoint of a method, or None."""
    table = getattr(quantizers, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})  # class name -> the methods
    classes = [name for name, entry in table.items() if method in entry["quantization_methods"]]
    for name, module in model.named_modules():
        kind = type(module)
        if any(getattr(inspect.getmodule(kind), class_name, None) is kind for class_name in classes):
            return name
    return None


def _needs_weight(model: nn.Module, compressed: Collection[str]) -> bool:
    """Whether the initialization of the model's class, which transformers runs when it loads, reads `linear.weight`.

    It is tried on a linear without weight, and on a copy of one module of each class that holds compressed linears.
    """
    packed = nn.Linear(1, 1, bias=False, device="meta")
    del packed.weight
    tried: list[nn.Module] = [packed]
    holders = {type(model.get_submodule(name)): name for name in sorted({n.rpartition(".")[0] for n in compressed})}
    for name in holders.values():
        module = model.get_submodule(name)
        tensors = (*module.parameters(), *module.buffers())
        tried.append(copy.deepcopy(module, {id(t): torch.empty_like(t, device="meta") for t in tensors}))
        for child in dict(module.named_children()):
            if f"{name}.{child}" in compressed:
                setattr(tried[-1], child, packed)
    try:
        if isinstance(model, PreTrainedModel):
            for module in tried:
                model._init_weights(module)
    except AttributeError:
        return True
    return False


def check_reader(resolved: ResolvedRecipe, facts: ModelFacts) -> tuple[str, ...]:
    """Return a note when it is known before the run that transformers cannot verify the checkpoint."""
    recipe, form, format_ = resolved.recipe, resolved.form, resolved.format
    if (reason := not_asked(recipe, form.config)) is not None:
        return (unverified(reason),) if reason == format_.misread(form.config) else ()
    schemes = {n: format_.adapt(layer.scheme) or LayerScheme(layer.scheme.shape) for n, layer in facts.items()}
    policies = cache_policies(form.model) | planned_policies(resolved)
    stated = stated_policy(form.model, policies, format_) is not None
    reason = unreadable(format_, form.model, schemes, form.dtype, stated)
    return () if reason is None else (unverified(reason),)


def unverified(reason: str) -> str:
    """Return the note of a plan whose checkpoint is verified with compress.load alone."""
    return f"{UNVERIFIED}{reason}"
