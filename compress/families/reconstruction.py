"""Targets and errors for passes that reconstruct the output of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from compress.api.layers import BlockInputs

ErrorName = Literal["symmetric", "asymmetric"]
"""The target of a block's output. 'symmetric': the original block's output for the same inputs. 'asymmetric': the
uncompressed model's activations after the block, so that the block also corrects errors of the blocks before it."""

Targets = Callable[[int], Tensor]
"""The target output of the block for a batch, by its number."""


def relative_square(found: Float[Tensor, "*any"], wanted: Float[Tensor, "*any"]) -> Tensor:
    """||found - wanted||^2 / ||wanted||^2 in float32."""
    wanted = wanted.float()
    return (found.float() - wanted).square().sum() / wanted.square().sum().clamp(min=1e-30)


def block_error(block: nn.Module, inputs: BlockInputs, targets: Targets, batches: Iterable[int]) -> float:
    """||block(X) - target||^2 / ||target||^2 over the given batches, by their numbers."""
    error = energy = 0.0
    for batch in batches:
        wanted = targets(batch).float()
        error += float((inputs.forward(block, batch).float() - wanted).square().sum())
        energy += float(wanted.square().sum())
    return error / max(energy, 1e-30)
