"""The hidden width between blocks: verify that its channels are interchangeable, and reduce it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import ModelError
from compress.models.forward import logits_of
from compress.models.kinds.batch import Batch
from compress.models.reshape.reconfigure import build, tensors
from compress.models.reshape.widths import Width
from compress.models.structure.probes import norms_of
from compress.numerics.metrics import relative_error

LOGITS_TOLERANCE = 1e-4  # relative, float32, whole model: a valid permutation gives 1e-6, an invalid one more than 1e-2
CUT_TOLERANCE = 1e-2  # relative, in the model's dtype: half precision rounds to 5e-3, a wrong cut gives over 1e-1

REROUTED = 16  # one token of so many may be routed to other experts

FORMS = ("weight", "1 + weight")
"""How norms use their weight."""


def check_interchangeable(model: PreTrainedModel, width: Width, batch: Batch, label: str) -> None:
    """Check that a permutation of the hidden channels in all their tensors leaves the logits unchanged.

    Raises:
        ModelError: if the logits change.
    """
    plain = {name: tensor.float() for name, tensor in tensors(model).items()}
    size = next(iter(width.axes.values()))[0]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).to(next(iter(plain.values())).device)
    permuted = change_along(plain, width, lambda tensor, dim: tensor.index_select(dim, order))
    expected = logits_of(build(model, model.config, plain), batch)
    error = relative_error(logits_of(build(model, model.config, permuted), batch), expected)
    if not error < LOGITS_TOLERANCE:
        raise ModelError(
            f"{label}: a permutation of the hidden channels changes the logits (relative error {error:.2g}), so the "
            "channels are not interchangeable; leave out the hidden width"
        )


def change_along(
    weights: Mapping[str, Tensor], width: Width, change: Callable[[Tensor, int], Tensor]
) -> dict[str, Tensor]:
    """Return the tensors, each changed along every dimension that belongs to the width."""
    changed = dict(weights)
    for name, dim in width.axes:
        changed[name] = change(changed[name], dim).contiguous()
    return changed


def cut_hidden_channels(
    model: PreTrainedModel,
    config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    width: Width,
    channels: Int[Tensor, " kept"],
    batch: Batch,
    label: str,
) -> PreTrainedModel:
    """Build the model of `config` with some hidden channels, equivalent to setting the others to zero.

    A norm averages over d' channels instead of d. With the same x, x / rms is then sqrt(d' / d) times its old value;
    the weights of the norms compensate for that factor.

    Args:
        model: model with all hidden channels.
        config: configuration of the narrower model.
        weights: tensors of the model.
        width: the hidden width.
        channels: hidden channels that are left.
        ids: token ids on which the logits are compared.
        label: label of the pass, for errors.

    Raises:
        ModelError: if the number of hidden channels has any further effect.
    """
    size, remaining = next(iter(width.axes.values()))
    assert remaining == len(channels)
    silent = torch.ones(size, dtype=torch.bool, device=channels.device)
    silent[channels] = False
    quiet = change_along(weights, width, lambda tensor, dim: tensor.index_fill(dim, silent.nonzero()[:, 0], 0))
    expected = logits_of(build(model, model.config, quiet), batch)
    small = change_along(weights, width, lambda tensor, dim: tensor.index_select(dim, channels))
    norms = [f"{name}.weight" for name in norms_of(model) if (f"{name}.weight", 0) in width.axes]
    grown = math.sqrt(size / remaining)
    error = math.inf
    for form in FORMS:
        more = {n: small[n] * grown if form == "weight" else (1 + small[n]) * grown - 1 for n in norms}
        new = build(model, config, small | more)
        error = _error_of_most_tokens(logits_of(new, batch), expected)
        if error < CUT_TOLERANCE:
            return new
    raise ModelError(
        f"{label}: the model with {remaining} of {size} hidden channels differs from the model with the others set to "
        f"zero (relative error {error:.2g}): a module other than an RMS norm depends on their number; "
        "leave out the hidden width"
    )


def _error_of_most_tokens(
    logits: Float[Tensor, "batch length vocabulary"], reference: Float[Tensor, "batch length vocabulary"]
) -> float:
    """Return the relative error without the sixteenth of the tokens with the largest errors.

    The epsilon of norms and rounding change the scores of a router by about 1e-3, so a token with two equally good
    experts may get the other one. Its error says nothing about the structure, which concerns all tokens.
    """
    squares = (logits.float() - reference.float()).square().flatten(0, -2).sum(1)
    most = squares.argsort()[: len(squares) - len(squares) // REROUTED]
    return float((squares[most].sum() / reference.float().flatten(0, -2)[most].square().sum()).sqrt())
