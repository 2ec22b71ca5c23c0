"""Rehearse the passes that change the shape of a model on random weights, so that a plan finds what they refuse.

Such a pass proves in a forward pass that the structure of the model allows the change. The proof needs some weights,
but not those of the checkpoint. A model that is too large is rehearsed with its first block alone.
"""

from __future__ import annotations

import copy

import torch
from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import CompressError, ModelError, NumericError, TargetError
from compress.models.experts import open_experts
from compress.models.kinds.contract import ModelKind
from compress.models.reshape.reconfigure import sketch, tensors, with_blocks
from compress.passes.contract.context import Run
from compress.passes.contract.passes import ModelPass
from compress.pipeline.resolve import ResolvedRecipe, with_config
from compress.pipeline.trial import random_examples

LARGEST = 1 << 26
"""Numbers in a rehearsed model; three copies of so many take 0.8 GB in float32."""
SEQUENCES, LENGTH = 2, 64
NOISE = 0.1
"""Standard deviation that is added to all initial weights, so that no norm or bias is neutral."""


def rehearse(resolved: ResolvedRecipe) -> list[str]:
    """Run every pass that changes the shape of the model on random weights of the shape that it will find.

    Returns a note for each pass whose model is too large. Raises the error of a pass that refuses the structure.
    """
    notes, form = [], resolved.opened
    for label, step, _ in resolved.steps:
        if not (isinstance(step, ModelPass) and step.requires.new_shape):
            continue
        if step.requires.rehearsal is not None:
            config, is_complete = _config(form.model)
            if config is None:
                notes.append(f"{label}: the model is too large to rehearse the pass; the run may refuse its structure")
            else:
                _try(step.requires.rehearsal, label, _random(form.model, config), is_complete, resolved.objective)
        form = with_config(form, step.outcome(form.model, label))
    return notes


def _try(step: ModelPass, label: str, model: PreTrainedModel, is_complete: bool, objective: ModelKind) -> None:
    """Run a pass. is_complete: False: the model has fewer blocks than the real one, which targets may name."""
    run = Run(label=label, calibration=random_examples(model, SEQUENCES, LENGTH), lm_objective=objective)
    try:
        step.apply(model, run)
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random_model = type(model)._from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=kind)
        for parameter in random_model.requires_grad_(False).parameters():
            parameter += NOISE * torch.randn_like(parameter)
    open_experts(random_model)
    return random_model.eval()
