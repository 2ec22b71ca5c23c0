"""What passes have in common that bring a block nearer to what it was: what it is to give, and how far off it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from compress.api.passes import BlockInputs

ErrorName = Literal["symmetric", "asymmetric"]
"""Against what a block's output is held: 'symmetric', what the block as it was makes of the same inputs; 'asymmetric',
what the uncompressed model has there, so that errors of the blocks before are made up for, too."""

Targets = Callable[[int], Tensor]
"""What the block is to give for a batch."""


def relative_square(found: Float[Tensor, "*any"], wanted: Float[Tensor, "*any"]) -> Tensor:
    """||found - wanted||^2 / ||wanted||^2 in float32."""
    wanted = wanted.float()
    return (found.float() - wanted).square().sum() / wanted.square().sum().clamp(min=1e-30)


def block_error(block: nn.Module, inputs: BlockInputs, targets: Targets, batches: Iterable[int]) -> float:
    """||block(X) - target||^2 / ||target||^2 over some batches."""
    wrong = whole = 0.0
    for batch in batches:
        wanted = targets(batch).float()
        wrong += float((inputs.forward(block, batch).float() - wanted).square().sum())
        whole += float(wanted.square().sum())
    return wrong / max(whole, 1e-30)
