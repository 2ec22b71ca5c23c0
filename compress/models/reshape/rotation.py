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
from compress.models.reshape.residual import FORMS, LOGITS_TOLERANCE, change_along
from compress.models.reshape.widths import Width
from compress.models.structure.blocks import linears_of_blocks
from compress.models.structure.links import find_groups
from compress.models.structure.probes import norms_of
from compress.numerics.metrics import relative_error


@dataclass(frozen=True)
class Refusal:
    """The context of an error message.

    Attributes:
        label: label of the pass.
        advice: what to write instead.
    """

    label: str
    advice: str

    def error(self, reason: str) -> ModelError:
        """Return the error for a model that the pass cannot change."""
        return ModelError(f"{self.label}: {reason}; {self.advice}")


def untying(model: PreTrainedModel) -> dict[Path, Any]:
    """Return the configuration edits that untie the head from the embeddings."""
    return {("tie_word_embeddings",): False} if getattr(model, "all_tied_weights_keys", None) else {}


def with_own_head(model: PreTrainedModel, refusal: Refusal) -> PreTrainedModel:
    """Return the model in float32 with an untied head.

    Raises:
        ModelError: if the head cannot be untied.
    """
    config = changed(model.config, untying(model))
    plain = {name: tensor.float() for name, tensor in tensors(model).items()}
    untied = None if config is None else build(model, config, plain)
    if untied is None or getattr(untied, "all_tied_weights_keys", None):
        raise ModelError(f"model: its head cannot be untied from the embeddings; {refusal.advice}")
    return untied


def readers_of_norms(model: PreTrainedModel, width: Width, batch: Batch, refusal: Refusal) -> dict[str, list[str]]:
    """Return the linears that read each norm of hidden states.

    Raises:
        ModelError: if one of them reads another tensor, or norms do more than divide.
    """
    reader_names = set(width.modules("in", model))
    if square := sorted(reader_names & set(width.modules("out", model)) & set(linears_of_blocks(model))):
        raise refusal.error(
            f"both sides of {square[0]} have the hidden width, because the configuration has no size of a head of its "
            "own, so a rotation of the hidden states would mix heads"
        )
    readers_by_norm: dict[str, list[str]] = {}
    for group in find_groups(model, lambda module: logits_of(module, batch)):
        names = [name for name in group.linears if name in reader_names]
        if names and group.norm is not None and (f"{group.norm}.weight", 0) in width.axes:
            readers_by_norm.setdefault(group.norm, []).extend(names)
    read = {name for names in readers_by_norm.values() for name in names}
    if missing := sorted(reader_names - read):
        experts = tuple(f"{name}." for name in in_experts(model))
        if experts and missing[0].startswith(experts):
            raise refusal.error(
                f"{missing[0]} belongs to an expert: its norm is also read by a router, whose weight is no linear that "
                "the norm could be folded into"
            )
        raise refusal.error(f"{missing[0]} reads hidden states that are not the output of a norm and cannot be rotated")
    if biased := [norm for norm in readers_by_norm if model.get_submodule(norm)._parameters.get("bias") is not None]:
        raise refusal.error(f"{biased[0]} adds a bias (LayerNorm), which a rotation does not preserve")
    written = [name for name in norms_of(model) if (f"{name}.weight", 0) in width.axes and name not in readers_by_norm]
    if written:
        raise refusal.error(
            f"{written[0]} scales the channels of what is added to the hidden states (a norm after attention or "
            "feed-forward layer, which no linear reads), and a rotation does not preserve that"
        )
    return readers_by_norm


def fold_norms(
    model: PreTrainedModel, readers: Mapping[str, list[str]], batch: Batch, refusal: Refusal
) -> PreTrainedModel:
    """Fold the weights of norms into their readers, so that norms only divide; the function stays the same.

    Raises:
        ModelError: if the logits change.
    """
    expected, errors = logits_of(model, batch), []
    for form in FORMS:
        weights = tensors(model)
        for norm, names in readers.items():
            weight = weights[f"{norm}.weight"]
            scale = weight if form == "weight" else 1 + weight
            weights[f"{norm}.weight"] = torch.ones_like(weight) if form == "weight" else torch.zeros_like(weight)
            for name in names:
                transposed = CompressedLinear.of(model.get_submodule(name)).transposed
                weights[f"{name}.weight"] = weights[f"{name}.weight"] * (scale[:, None] if transposed else scale)
        folded = build(model, model.config, weights)
        errors.append(relative_error(logits_of(folded, batch), expected))
        if errors[-1] < LOGITS_TOLERANCE:
            return folded
    raise refusal.error(
        "folding the weights of norms into the linears that read them changes the logits (relative error "
        f"{min(errors):.2g}): other modules read these norms too"
    )


def rotate(
    model: PreTrainedModel, width: Width, norms: Sequence[str], rotation: Tensor, batch: Batch, refusal: Refusal
) -> tuple[dict[str, Tensor], float]:
    """Return the rotated weights and the relative error of the logits.

    Raises:
        ModelError: if the logits change.
    """
    weights = tensors(model)
    turned = change_along(weights, width, lambda t, dim: (t.movedim(dim, -1) @ rotation).movedim(-1, dim))
    turned |= {f"{norm}.weight": weights[f"{norm}.weight"] for norm in norms}
    error = relative_error(logits_of(build(model, model.config, turned), batch), logits_of(model, batch))
    if not error < LOGITS_TOLERANCE:
        raise refusal.error(
            f"a rotation of the hidden states changes the logits (relative error {error:.2g}): a module that reads or "
            "writes them is not linear, or a norm is not an RMS norm"
        )
    return turned, error
