"""What a trained linear multiplies by, made of the float weight that is trained: the part that methods differ in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from compress.model.linear import CompressedLinear
from compress.numerics.quant.codes import Codes
from compress.numerics.sparse.masks import Pattern
from compress.numerics.sparse.schedules import partial_mask

Kind = Literal["scales", "norms", "weights", "biases"]
"""What can be trained, each with a rate of its own."""

Shares = Mapping[str, tuple[Tensor | float, int]]
"""What a step did, by name: how many weights of how many; over all layers these add up to shares."""


class Parametrization(nn.Module):
    """How one linear's weight W [out, in] is trained; a pass that trains gives each linear its own.

    In every step: `forward` makes the weight that is multiplied by, with its own rule for the gradient; once the
    gradients of all parts of the step are summed up, `adjust` may change that of W; after the optimizer's step `update`
    does what is due. In the end `settle` says what the layer becomes.

    Its parameters are trained beside W, with the rate of the kind `own`; its buffers, changed in place alone, are
    whatever else the next step depends on, such as masks. Both are in checkpoints and put back with the best state.
    """

    own: ClassVar[Kind] = "scales"
    trains_weight: ClassVar[bool] = True  # whether W itself is trained, or stays as it came

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """The weight that is multiplied by; called in every forward pass."""
        return weight

    def adjust(self, weight: nn.Parameter) -> None:
        """Before the optimizer's step, and before gradients are clipped: `weight.grad` is that of the whole step."""

    def update(self, weight: nn.Parameter, done: int, of: int) -> Shares:
        """After each step of all (`done` of them are behind), and with done = 0 before the first; what the curve tells.

        Weights may be changed in place. Not called again for steps that a killed run had done.
        """
        return {}

    def ready(self, done: int, of: int) -> bool:
        """Whether the state after so many steps is one that could be kept: a schedule of pruning is at its end."""
        return True

    def finalize(
        self, weight: Float[Tensor, "out in"], storage: torch.dtype
    ) -> tuple[Float[Tensor, "out in"] | Codes, Bool[Tensor, "out in"] | None]:
        """What the layer becomes, and its mask (None: as before). Dense weights are rounded to `storage` afterwards."""
        return self.forward(weight), None


class Masked(Parametrization):
    """W * mask: pruned weights get no gradient, and are exactly zero after every step."""

    mask: Tensor

    def __init__(self, mask: Bool[Tensor, "out in"]) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        return weight * self.mask

    def update(self, weight: nn.Parameter, done: int, of: int) -> Shares:
        weight.mul_(self.mask)
        return {}

    def finalize(
        self, weight: Float[Tensor, "out in"], storage: torch.dtype
    ) -> tuple[Float[Tensor, "out in"], Bool[Tensor, "out in"] | None]:
        return self.forward(weight), self.mask


def magnitudes(weight: Float[Tensor, "out in"], allowed: Bool[Tensor, "out in"] | None) -> Float[Tensor, "out in"]:
    """Scores to choose masks by: |W_ij|, and -1 where an earlier pass has removed a weight, which stays so."""
    return weight.abs() if allowed is None else weight.abs().masked_fill(~allowed, -1)


class Shrinking(Masked):
    """W * mask, where the mask may be made smaller on the way."""

    def __init__(self, layer: CompressedLinear) -> None:
        mask = layer.mask
        super().__init__(torch.ones(layer.shape, dtype=torch.bool) if mask is None else mask)

    def shrink(self, weight: nn.Parameter, pattern: Pattern, sparsity: float) -> None:
        """Remove the smallest weights until the sparsity is reached; what is gone already counts."""
        self.mask &= partial_mask(pattern, magnitudes(weight.detach(), self.mask), 1 - sparsity)

    def update(self, weight: nn.Parameter, done: int, of: int) -> Shares:
        weight.mul_(self.mask)
        return {"sparsity": ((~self.mask).sum(), self.mask.numel())}


Parametrize = Callable[[str, CompressedLinear], Parametrization]
"""parametrize(full name, dense linear): how its weight is trained."""


def masked(name: str, layer: CompressedLinear) -> Parametrization:
    """The mask that the layer came with stays; without one the weight is trained as it is."""
    mask = layer.mask
    return Parametrization() if mask is None else Masked(mask)
