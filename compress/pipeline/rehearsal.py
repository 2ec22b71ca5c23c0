"""Rehearse passes that may refuse the structure of a model on random weights, so that a plan finds what they refuse.

Such a pass proves in a forward pass that the structure of the model allows a change: of its shape, or of the order of
channels in a block. The proof needs some weights, but not those of the checkpoint. A model that is too large is
rehearsed with its first block alone.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable
from contextlib import suppress
from dataclasses import replace

import torch
from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import CompressError, ModelError, NumericError, TargetError
from compress.layers.linear import linears, replace_linear
from compress.models.experts import open_experts
from compress.models.quiet import BUILDING
from compress.models.reshape.reconfigure import sketch, tensors, with_blocks
from compress.models.structure.links import block_signature
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.facts import ANY_LAYER
from compress.passes.contract.journal import Journal
from compress.passes.contract.passes import ModelPass, Step
from compress.pipeline.engine import Memory, engine
from compress.pipeline.resolve import ResolvedRecipe, own_options, run_of, schemes_of, with_config
from compress.pipeline.sources import in_memory
from compress.pipeline.trial import random_examples

LARGEST = 1 << 26
"""Numbers in a rehearsed model; three copies of so many take 0.8 GB in float32."""
SEQUENCES, LENGTH = 2, 64
NOISE = 0.1
"""Standard deviation that is added to all initial weights, so that no norm or bias is neutral."""


def rehearse(resolved: ResolvedRecipe) -> list[str]:
    """Run every pass that declares a rehearsal on random weights of the shape that it will find.

    Returns a note for each pass whose model is too large. Raises the error of a pass that refuses the structure.
    """
    notes, form = [], resolved.opened
    coded = {name for name, scheme in schemes_of(form).items() if scheme.quantized}
    for label, step, names in resolved.steps:
        rehearsal = step.requires.rehearsal
        if rehearsal is not None:
            config, is_complete = _config(form.model)
            if config is None:
                notes.append(f"{label}: the model is too large to rehearse the pass; the run may refuse its structure")
            elif isinstance(rehearsal, ModelPass):
                _try(_alone(resolved, _random(form.model, config), (label, rehearsal, names)), is_complete)
            else:
                _sweep(_alone(resolved, _random(form.model, config), (label, rehearsal, names)), coded)
        if isinstance(step, ModelPass) and step.requires.new_shape:
            form, coded = with_config(form, step.outcome(form.model, label)), set()
        coded |= {name for name in names if "quantized" in own_options(step, name).effects(ANY_LAYER).facts}
    return notes


def _alone(resolved: ResolvedRecipe, model: PreTrainedModel, step: Step) -> ResolvedRecipe:
    """Return a recipe of one pass on a model in memory."""
    opened = in_memory(model)
    return replace(resolved, opened=opened, form=opened, steps=(step,), storage=torch.float32)


def _sweep(resolved: ResolvedRecipe, coded: Collection[str]) -> None:
    """Sweep a block pass over the first block of each kind. coded: layers that earlier passes have quantized."""
    ((label, step, chosen),) = resolved.steps
    opened, names, kinds = resolved.opened, list[str](), set[Hashable]()
    for block in opened.blocks:
        inside = linears(block.module)
        mine = [name for name in inside if f"{block.name}.{name}" in chosen]
        with_codes = [name for name in inside if f"{block.name}.{name}" in coded]
        kind = block_signature(block.module), tuple(mine), tuple(with_codes)
        if kind not in kinds:
            kinds.add(kind)
            names += [f"{block.name}.{name}" for name in mine]
        for name in with_codes:
            layer = replace_linear(block.module, name)
            layer.put(quantize(layer.weight, GRIDS["int8"]))
    if names:
        resolved = replace(resolved, steps=((label, step, names),))
        probe = random_examples(opened.model, 1, LENGTH)[0]
        with suppress(NumericError):  # of the random weights
            engine(resolved, [], probe, run_of(resolved, Journal()), Memory())


def _try(resolved: ResolvedRecipe, is_complete: bool) -> None:
    """Run a pass. is_complete: False: the model has fewer blocks than the real one, which targets may name."""
    ((label, step, _),) = resolved.steps
    assert isinstance(step, ModelPass)
    model = resolved.opened.model
    try:
        step.apply(
            model, run_of(resolved, Journal(), label=label, calibration=random_examples(model, SEQUENCES, LENGTH))
        )
    except NumericError:
        return  # of the random weights
    except (ModelError, TargetError) as error:
        if is_complete or not isinstance(error, TargetError):
            raise
    except CompressError:
        return


def _config(model: PreTrainedModel) -> tuple[PretrainedConfig | None, bool]:
    """The configuration to rehearse with, None if all are too large, and whether it has all blocks."""
    if _numbers(model) <= LARGEST:
        return model.config, True
    try:
        config = with_blocks(model, [0])
    except ModelError:
        return None, False
    small = sketch(model, config)
    return (config if small is not None and _numbers(small) <= LARGEST else None), False


def _numbers(model: PreTrainedModel) -> int:
    return sum(tensor.numel() for tensor in tensors(model).values())


def _random(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of a configuration with random weights, the same at every call; the global random state stays."""
    kind = getattr(model.config, "_attn_implementation", None)
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random_model = type(model)._from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=kind)
        for parameter in random_model.requires_grad_(False).parameters():
            parameter += NOISE * torch.randn_like(parameter)
    open_experts(random_model)
    return random_model.eval()
