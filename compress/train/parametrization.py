"""Parametrizations compute the weight of a trained linear from its trained float weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear
from compress.numerics.quant.codes import Codes
from compress.numerics.sparse.masks import Pattern
from compress.numerics.sparse.schedules import partial_mask

Kind = Literal["scales", "norms", "weights", "biases"]
"""The kinds of trained parameters of a layer or a norm, each with a separate learning rate."""

ParameterKind = Literal[Kind, "rotations"]
"""The kinds of all trained parameters."""

Shares = Mapping[str, tuple[Tensor | float, int]]
"""Counts of a step by name: (affected weights, all weights); summed over all layers they give fractions."""


class Parametrization(nn.Module):
    """How the weight W [out, in] of a linear is trained; a pass that trains creates an instance for each linear.

    In every step, `forward` computes the weight of the matrix product, with its rule for the gradient. After the
    gradients of all parts of the step are summed, `adjust` may change the gradient of W, and `decay` W itself. After
    the optimizer step, `update` applies scheduled changes. At the end, `finalize` returns the final weight of the
    layer.

    The parameters are trained in addition to W, with the learning rate of `parameter_kind`. The buffers hold all other
    state on which the next step depends, such as masks, and are changed only in place. Checkpoints contain both, and
    both are restored with the best state.

    Attributes:
        parameter_kind: kind of the parameters.
        trains_weight: whether W itself is trained.
    """

    parameter_kind: ClassVar[Kind] = "scales"
    trains_weight: ClassVar[bool] = True  # whether W itself is trained

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Compute the weight of the matrix product; called in every forward pass."""
        return weight

    def adjust(self, weight: nn.Parameter) -> None:
        """Change `weight.grad`, the gradient of the complete step, before clipping and the optimizer step."""

    def decay(self, weight: nn.Parameter, rate: float) -> None:
        """Shrink weights before the optimizer step.

        The decay is decoupled from the gradient as in AdamW (Loshchilov & Hutter 2019): a penalty in the gradient would
        be divided by its moving average, so that the size of the penalty would hardly matter.

        Args:
            weight: the trained weight.
            rate: learning rate of weights in this step.
        """

    def update(self, weight: nn.Parameter, step: int, total_steps: int) -> Shares:
        """Apply changes after a step, and before the first step with step = 0. Weights may be changed in place.

        A resumed run does not repeat the call for completed steps.

        Args:
            weight: the trained weight.
            step: number of completed steps.
            total_steps: number of steps of the training.

        Returns:
            Counts for the training curve.
        """
        return {}

    def ready(self, step: int, total_steps: int) -> bool:
        """Return whether the state after `step` steps may be the result; during a pruning schedule it may not."""
        return True

    def finalize(
        self, weight: Float[Tensor, "out in"], storage: torch.dtype
    ) -> tuple[Float[Tensor, "out in"] | Codes, Bool[Tensor, "out in"] | None]:
        """Return the final weight of the layer and its mask (None for an unchanged mask).

        The caller rounds dense weights to `storage`.
        """
        return self.forward(weight), None


class Masked(Parametrization):
    """W * mask: pruned weights get no gradient and are exactly zero after every step.

    Attributes:
        mask: True for weights that are not pruned.
    """

    mask: Tensor

    def __init__(self, mask: Bool[Tensor, "out in"]) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        return weight * self.mask

    def update(self, weight: nn.Parameter, step: int, total_steps: int) -> Shares:
        weight.mul_(self.mask)
        return {}

    def finalize(
        self, weight: Float[Tensor, "out in"], storage: torch.dtype
    ) -> tuple[Float[Tensor, "out in"], Bool[Tensor, "out in"] | None]:
        return self.forward(weight), self.mask


class LowRankUpdate(Parametrization):
    """mask * (W + scaling * B A) with a frozen W (LoRA, Hu 2021). B starts at zero, A at random values.

    Attributes:
        mask: True for weights that are not pruned, or None.
        scaling: factor of the update.
        down: A [rank, in].
        up: B [out, rank].
    """

    parameter_kind: ClassVar[Kind] = "weights"
    trains_weight: ClassVar[bool] = False
    mask: Tensor | None

    def __init__(
        self, mask: Bool[Tensor, "out in"] | None, shape: tuple[int, int], rank: int, scaling: float, seed: int
    ) -> None:
        super().__init__()
        rows, width = shape
        self.scaling = scaling
        self.register_buffer("mask", mask)
        bound = 1 / math.sqrt(width)  # reference code: Kaiming uniform initialization with a = sqrt(5)
        uniform = torch.rand(rank, width, generator=torch.Generator().manual_seed(seed))
        self.down = nn.Parameter(bound * (2 * uniform - 1))
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        updated = weight + self.scaling * (self.up @ self.down)
        return updated if self.mask is None else updated * self.mask


def magnitudes(weight: Float[Tensor, "out in"], allowed: Bool[Tensor, "out in"] | None) -> Float[Tensor, "out in"]:
    """Compute scores for masks: |W_ij|, and -1 for weights that an earlier pass removed, so that they stay removed."""
    return weight.abs() if allowed is None else weight.abs().masked_fill(~allowed, -1)


class Shrinking(Masked):
    """W * mask, where the mask may shrink during training."""

    def __init__(self, layer: CompressedLinear) -> None:
        mask = layer.mask
        super().__init__(torch.ones(layer.shape, dtype=torch.bool) if mask is None else mask)

    def shrink(self, weight: nn.Parameter, pattern: Pattern, sparsity: float) -> None:
        """Remove the smallest weights until the sparsity is reached; weights that are already removed count."""
        self.mask &= partial_mask(pattern, magnitudes(weight.detach(), self.mask), 1 - sparsity)

    def update(self, weight: nn.Parameter, step: int, total_steps: int) -> Shares:
        weight.mul_(self.mask)
        return {"sparsity": ((~self.mask).sum(), self.mask.numel())}


Parametrize = Callable[[str, CompressedLinear], Parametrization]
"""Creates the parametrization of the weight of a dense linear from its full name and the linear."""


def masked(name: str, layer: CompressedLinear) -> Parametrization:
    """Return a parametrization that preserves the layer's mask, or trains the weight directly if it has none."""
    mask = layer.mask
    return Parametrization() if mask is None else Masked(mask)
