"""Rotate the hidden states: fold norms into the linears that read them, and rotate every reader and writer.

x / rms(x) does not change its length under an orthogonal matrix, so a model whose norms only divide computes the same
with rotated hidden states (SliceGPT, Ashkboos 2024, theorem 1). Every step is proved by the logits in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import ModelError
from compress.layers.linear import CompressedLinear
from compress.models.experts import in_experts
from compress.models.forward import logits_of
from compress.models.kinds.batch import Batch
from compress.models.reshape.reconfigure import Path, build, changed, tensors
from compress.models.reshape.residual import FORMS, TRADED, along
from compress.models.reshape.widths import Width
from compress.models.structure.blocks import linears_of_blocks
from compress.models.structure.links import find_groups
from compress.models.structure.probes import norms_of
from compress.numerics.metrics import relative_error


@dataclass(frozen=True)
class Told:
    """The parts of an error message. where: the label of the pass. instead: what to write instead."""

    where: str
    instead: str


def untying(model: PreTrainedModel) -> dict[Path, Any]:
    """The configuration edits that untie the head from the embeddings."""
    return {("tie_word_embeddings",): False} if getattr(model, "all_tied_weights_keys", None) else {}


def with_own_head(model: PreTrainedModel, told: Told) -> PreTrainedModel:
    """The model in float32, its head no longer tied. Raises ModelError."""
    config = changed(model.config, untying(model))
    plain = {name: tensor.float() for name, tensor in tensors(model).items()}
    own = None if config is None else build(model, config, plain)
    if own is None or getattr(own, "all_tied_weights_keys", None):
        raise ModelError(f"model: its head cannot be untied from the embeddings; {told.instead}")
    return own


def readers_of_norms(model: PreTrainedModel, width: Width, batch: Batch, told: Told) -> dict[str, list[str]]:
    """The linears that read each norm of hidden states.

    Raises ModelError, with the property that the model lacks, if one reads another tensor or norms do more than divide.
    """
    wanted = set(width.modules("in", model))
    if square := sorted(wanted & set(width.modules("out", model)) & set(linears_of_blocks(model))):
        raise ModelError(
            f"{told.where}: both sides of {square[0]} have the hidden width, because the configuration has no size of "
            f"a head of its own, so a rotation of the hidden states would mix heads; {told.instead}"
        )
    found: dict[str, list[str]] = {}
    for group in find_groups(model, lambda whole: logits_of(whole, batch)):
        names = [name for name in group.linears if name in wanted]
        if names and group.norm is not None and (f"{group.norm}.weight", 0) in width.axes:
            found.setdefault(group.norm, []).extend(names)
    read = {name for names in found.values() for name in names}
    if missing := sorted(wanted - read):
        experts = tuple(f"{name}." for name in in_experts(model))
        if experts and missing[0].startswith(experts):
            raise ModelError(
                f"{told.where}: {missing[0]} belongs to an expert: its norm is also read by a router, whose weight is "
                f"no linear that the norm could be folded into; {told.instead}"
            )
        raise ModelError(
            f"{told.where}: {missing[0]} reads hidden states that are not the output of a norm and cannot be rotated; "
            f"{told.instead}"
        )
    if biased := [norm for norm in found if model.get_submodule(norm)._parameters.get("bias") is not None]:
        raise ModelError(
            f"{told.where}: {biased[0]} adds a bias (LayerNorm), which a rotation does not preserve; {told.instead}"
        )
    written = [name for name in norms_of(model) if (f"{name}.weight", 0) in width.axes and name not in found]
    if written:
        raise ModelError(
            f"{told.where}: {written[0]} scales the channels of what is added to the hidden states (a norm after "
            f"attention or feed-forward layer, which no linear reads), and a rotation does not "
            f"preserve that; {told.instead}"
        )
    return found


def fold_norms(model: PreTrainedModel, readers: Mapping[str, list[str]], batch: Batch, told: Told) -> PreTrainedModel:
    """Fold the weights of norms into their readers, so that norms only divide; the function stays the same.

    Raises ModelError if the function changes.
    """
    before, errors = logits_of(model, batch), []
    for form in FORMS:
        held = tensors(model)
        for norm, names in readers.items():
            weight = held[f"{norm}.weight"]
            scale = weight if form == "weight" else 1 + weight
            held[f"{norm}.weight"] = torch.ones_like(weight) if form == "weight" else torch.zeros_like(weight)
            for name in names:
                transposed = CompressedLinear.of(model.get_submodule(name)).transposed
                held[f"{name}.weight"] = held[f"{name}.weight"] * (scale[:, None] if transposed else scale)
        found = build(model, model.config, held)
        errors.append(relative_error(logits_of(found, batch), before))
        if errors[-1] < TRADED:
            return found
    raise ModelError(
        f"{told.where}: folding the weights of norms into the linears that read them changes the logits (relative "
        f"error {min(errors):.2g}): other modules read these norms too; {told.instead}"
    )


def rotate(
    model: PreTrainedModel, width: Width, norms: Sequence[str], rotation: Tensor, batch: Batch, told: Told
) -> tuple[dict[str, Tensor], float]:
    """Return (the rotated weights, relative error of the logits). Raises ModelError if the logits change."""
    held = tensors(model)
    turned = along(held, width, lambda t, dim: (t.movedim(dim, -1) @ rotation).movedim(-1, dim))
    turned |= {f"{norm}.weight": held[f"{norm}.weight"] for norm in norms}
    error = relative_error(logits_of(build(model, model.config, turned), batch), logits_of(model, batch))
    if not error < TRADED:
        raise ModelError(
            f"{told.where}: a rotation of the hidden states changes the logits (relative error {error:.2g}): a module "
            f"that reads or writes them is not linear, or a norm is not an RMS norm; {told.instead}"
        )
    return turned, error
