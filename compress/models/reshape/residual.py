"""The hidden width between blocks: verify that its channels are interchangeable, and reduce it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import ModelError
from compress.models.forward import logits_of
from compress.models.kinds.batch import Batch
from compress.models.reshape.reconfigure import build, tensors
from compress.models.reshape.widths import Width
from compress.models.structure.probes import norms_of
from compress.numerics.metrics import relative_error

TRADED = 1e-4  # relative, float32, whole model: a valid permutation gives 1e-6, an invalid one more than 1e-2
SAME = 1e-2  # relative, in the model's dtype: another summation order in half precision gives 5e-3, a wrong cut > 1e-1

FORMS = ("weight", "1 + weight")
"""How norms use their weight."""


def check_traded(model: PreTrainedModel, width: Width, batch: Batch, where: str) -> None:
    """Raise ModelError unless a permutation of the hidden channels in all their tensors leaves the logits unchanged."""
    plain = {name: tensor.float() for name, tensor in tensors(model).items()}
    size = next(iter(width.axes.values()))[0]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).to(next(iter(plain.values())).device)
    traded = along(plain, width, lambda tensor, dim: tensor.index_select(dim, order))
    before = logits_of(build(model, model.config, plain), batch)
    error = relative_error(logits_of(build(model, model.config, traded), batch), before)
    if not error < TRADED:
        raise ModelError(
            f"{where}: a permutation of the hidden channels changes the logits (relative error {error:.2g}), so the "
            "channels are not interchangeable; leave out the hidden width"
        )


def along(held: Mapping[str, Tensor], width: Width, change: Callable[[Tensor, int], Tensor]) -> dict[str, Tensor]:
    """The tensors, each changed along every dimension that belongs to the width."""
    found = dict(held)
    for name, dim in width.axes:
        found[name] = change(found[name], dim).contiguous()
    return found


def cut_hidden_channels(
    model: PreTrainedModel,
    config: PretrainedConfig,
    held: Mapping[str, Tensor],
    width: Width,
    kept: Int[Tensor, " kept"],
    batch: Batch,
    where: str,
) -> PreTrainedModel:
    """Build the model of `config` with the kept hidden channels, equivalent to zeroing the other channels.

    A norm averages over d' channels instead of d. With the same x, x / rms is then sqrt(d' / d) times its old value;
    the norms' weights compensate for that factor.

    Raises ModelError when the number of hidden channels has any further effect.
    """
    size, left = next(iter(width.axes.values()))
    assert left == len(kept)
    silent = torch.ones(size, dtype=torch.bool, device=kept.device)
    silent[kept] = False
    quiet = along(held, width, lambda tensor, dim: tensor.index_fill(dim, silent.nonzero()[:, 0], 0))
    wanted = logits_of(build(model, model.config, quiet), batch)
    small = along(held, width, lambda tensor, dim: tensor.index_select(dim, kept))
    norms = [f"{name}.weight" for name in norms_of(model) if (f"{name}.weight", 0) in width.axes]
    grown = math.sqrt(size / left)
    for form in FORMS:
        more = {n: small[n] * grown if form == "weight" else (1 + small[n]) * grown - 1 for n in norms}
        new = build(model, config, small | more)
        error = relative_error(logits_of(new, batch), wanted)
        if error < SAME:
            return new
    raise ModelError(
        f"{where}: the model with {left} of {size} hidden channels differs from the model with the others set to zero "
        f"(relative error {error:.2g}): a module other than an RMS norm depends on their number; "
        "leave out the hidden width"
    )
