"""Parametrizations: how a trained linear computes its weight from the trained float weight; methods differ here."""

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
"""The kinds of trained parameters of a layer or a norm, each with its own rate."""

ParameterKind = Literal[Kind, "rotations"]
"""The kinds of all trained parameters."""

Shares = Mapping[str, tuple[Tensor | float, int]]
"""Counts of a step by name: (affected weights, all weights); summed over all layers they give fractions."""


class Parametrization(nn.Module):
    """How one linear's weight W [out, in] is trained; a pass that trains gives each linear its own instance.

    In every step, `forward` computes the weight of the matrix product, with its own rule for the gradient. After the
    gradients of all parts of the step are summed, `adjust` may change the gradient of W, and `decay` W itself. After
    the optimizer's step, `update` applies scheduled changes. At the end, `finalize` returns the layer's final weight.

    Its parameters are trained in addition to W, with the rate of the kind `own`. Its buffers hold all other state that
    the next step depends on, such as masks, and are changed only in place. Checkpoints contain both, and both are
    restored with the best state.
    """

    own: ClassVar[Kind] = "scales"
    trains_weight: ClassVar[bool] = True  # whether W itself is trained

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """The weight of the matrix product; called in every forward pass."""
        return weight

    def adjust(self, weight: nn.Parameter) -> None:
        """Change `weight.grad`, the gradient of the whole step, before it is clipped and the optimizer steps."""

    def decay(self, weight: nn.Parameter, rate: float) -> None:
        """Shrink weights before the optimizer's step. rate: the learning rate of weights in this step.

        Decoupled from the gradient as the decay of AdamW (Loshchilov & Hutter 2019): a penalty in the gradient would be
        divided by its moving average, so that the size of the penalty would hardly matter.
        """

    def update(self, weight: nn.Parameter, done: int, of: int) -> Shares:
        """Apply changes after step number `done` of `of`, and before the first step with done = 0.

        Weights may be changed in place. Returns counts for the training curve. A resumed run does not repeat the call
        for completed steps.
        """
        return {}

    def ready(self, done: int, of: int) -> bool:
        """Whether the state after so many steps may be kept; during a pruning schedule it may not."""
        return True

    def finalize(
        self, weight: Float[Tensor, "out in"], storage: torch.dtype
    ) -> tuple[Float[Tensor, "out in"] | Codes, Bool[Tensor, "out in"] | None]:
        """The layer's final weight, and its mask (None: unchanged). The caller rounds dense weights to `storage`."""
        return self.forward(weight), None


class Masked(Parametrization):
    """W * mask: pruned weights get no gradient and are exactly zero after every step."""

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


class LowRankUpdate(Parametrization):
    """mask * (W + scaling * B A), with a frozen W (LoRA, Hu 2021): B starts at zero, A at random values of a seed."""

    own: ClassVar[Kind] = "weights"
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
        drawn = torch.rand(rank, width, generator=torch.Generator().manual_seed(seed))
        self.down = nn.Parameter(bound * (2 * drawn - 1))
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        found = weight + self.scaling * (self.up @ self.down)
        return found if self.mask is None else found * self.mask


def magnitudes(weight: Float[Tensor, "out in"], allowed: Bool[Tensor, "out in"] | None) -> Float[Tensor, "out in"]:
    """Scores for choosing masks: |W_ij|, and -1 where an earlier pass removed the weight, which keeps it removed."""
    return weight.abs() if allowed is None else weight.abs().masked_fill(~allowed, -1)


class Shrinking(Masked):
    """W * mask, where the mask may shrink during training."""

    def __init__(self, layer: CompressedLinear) -> None:
        mask = layer.mask
        super().__init__(torch.ones(layer.shape, dtype=torch.bool) if mask is None else mask)

    def shrink(self, weight: nn.Parameter, pattern: Pattern, sparsity: float) -> None:
        """Remove the smallest weights until the sparsity is reached; already removed weights count."""
        self.mask &= partial_mask(pattern, magnitudes(weight.detach(), self.mask), 1 - sparsity)

    def update(self, weight: nn.Parameter, done: int, of: int) -> Shares:
        weight.mul_(self.mask)
        return {"sparsity": ((~self.mask).sum(), self.mask.numel())}


Parametrize = Callable[[str, CompressedLinear], Parametrization]
"""parametrize(full name, dense linear): the parametrization of its weight."""


def masked(name: str, layer: CompressedLinear) -> Parametrization:
    """Keep the layer's mask during training; train the weight directly if it has none."""
    mask = layer.mask
    return Parametrization() if mask is None else Masked(mask)
