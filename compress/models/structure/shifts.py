"""Subtract a constant per channel from what a norm or linear writes; the readers' biases make up for it.

Outlier Suppression+ (arXiv 2304.09145), section 4.1: W x + b = W (x - z) + (W z + b).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear, linears
from compress.models.structure.links import Fold, Link, apply_verified, scope_of
from compress.models.structure.probes import Forward, width_out
from compress.models.structure.rewrite import remember


def without_bias(block: nn.Module, link: Link) -> list[str]:
    """Return the names of the source and readers of a link that have no bias; a shift needs all of them."""
    names = (link.source, *link.readers)
    return [name for name in names if block.get_submodule(name)._parameters.get("bias") is None]


def fold_shift(block: nn.Module, link: Link, shift: Float[Tensor, " in"], forward: Forward) -> Fold:
    """Subtract `shift` from the bias of the link's source, and add W shift to the biases of its readers.

    The rewrite is verified numerically (`apply_verified`). Attention preserves a shift of its values, because its
    weights have the sum 1; an activation function does not.

    Args:
        block: block of a model.
        link: link along which the shift moves.
        shift: one per input column of the readers, equal where columns share a channel.
        forward: forward pass of the block on fixed inputs.
    """
    assert not without_bias(block, link), "a shift needs a bias in every module of the link"
    block, link, forward = scope_of(block, link, forward)
    return apply_verified(block, forward, {"bias": partial(_rewrite, link=link, shift=shift)})


def _rewrite(block: nn.Module, link: Link, shift: Tensor) -> Callable[[], None]:
    """Write a shift into the biases; return a function that undoes it."""
    source = block.get_submodule(link.source)
    readers = [block.get_submodule(name) for name in link.readers]
    undo, linear_names = remember(source, *readers), linears(block).keys()
    written = shift.new_zeros(width_out(source))
    written[link.channels.to(shift.device)] = shift
    _add(source, -written)
    for name, module in zip(link.readers, readers, strict=True):
        is_linear = name in linear_names
        weight = CompressedLinear.of(module).weight if is_linear else module.get_parameter("weight").detach()
        _add(module, weight.float() @ shift.to(weight.device))
    return undo


def _add(module: nn.Module, offset: Tensor) -> None:
    """Add to the bias of a module, as a new parameter."""
    bias = module.get_parameter("bias").detach()
    module.bias = nn.Parameter((bias.float() + offset.to(bias.device)).to(bias.dtype), requires_grad=False)
