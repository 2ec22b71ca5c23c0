"""Top-KAST: always sparse training, forward by the largest weights, backward by some more (Jayakumar 2021)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear
from compress.numerics.sparse.masks import Pattern
from compress.passes.families.training import SparseTrainingPass
from compress.train.parametrization import Parametrization, Shares, magnitudes

PENALTY = 0.1  # the usual weight decay of AdamW; the paper's 1e-4 is that of SGD with rates near 1


class TopKAST(SparseTrainingPass):
    """Train at a constant sparsity: the forward pass uses the largest weights, and more weights than these are trained.

    A is the set of weights of the forward pass, B the larger set of weights that are trained. Weights outside of B do
    not change.

    The exploration penalty is an L2 penalty with the coefficient `penalty`. Its factor is 1 in A, and 1/D in B without
    A, where D is the density of A; so a weight outside of A needs a larger gradient to enter A. Its gradient is a
    decay, decoupled from the optimizer as in AdamW.

    In the first stage A and B are chosen anew every few steps among all weights. In the second stage, refinement, both
    are fixed and B equals A. With an N:M pattern B keeps more weights of each M than A. Weights that earlier passes
    removed stay zero.
    """

    use_for: ClassVar[str] = (
        "Long training at a constant sparsity, where the optimizer's memory for all weights is too much."
    )
    not_for: ClassVar[str] = "Compressing a trained model in minutes: sparsegpt."
    paper: ClassVar[str] = "https://arxiv.org/abs/2106.03517"

    backward_sparsity: float | None = Field(
        default=None, ge=0, lt=1, description="fraction of the weights without a gradient; default: half of sparsity"
    )
    penalty: float = Field(
        default=PENALTY, ge=0, description="coefficient of the exploration penalty, as the weight decay of AdamW"
    )
    explore: float = Field(default=0.5, ge=0, le=1, description="fraction of the steps after which the masks are fixed")
    every: int = Field(default=1, ge=1, description="steps between two updates of the masks")

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.outer_sparsity >= self.target_sparsity:
            raise ValueError(
                f"backward_sparsity {self.outer_sparsity:g} must be below sparsity, {self.target_sparsity:g}: "
                "more weights must be trained than kept"
            )
        if self.pattern.n_of_m is not None and self.wide(self.pattern) == self.pattern:
            m = self.pattern.n_of_m[1]
            raise ValueError(
                f"backward_sparsity {self.outer_sparsity:g} of pattern {self.pattern.text} trains no more weights than "
                f"it keeps; lower it by at least 1/{m}"
            )

    @property
    def outer_sparsity(self) -> float:
        """The sparsity of B."""
        return self.target_sparsity / 2 if self.backward_sparsity is None else self.backward_sparsity

    def wide(self, pattern: Pattern) -> Pattern | None:
        """Return the pattern of B; None: all weights are in it."""
        if pattern.n_of_m is None:
            return pattern if self.outer_sparsity else None
        m = pattern.n_of_m[1]
        n = round((1 - self.outer_sparsity) * m)
        return None if n == m else Pattern(f"{n}:{m}")

    def parametrize(self, name: str, layer: CompressedLinear) -> Parametrization:
        return _TwoSets(self, layer.mask, layer.shape)


class _Forward(torch.autograd.Function):
    """W * A in the forward pass; the backward pass gives a gradient to all of B."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        ctx.save_for_backward(outer)
        return weight * inner

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (outer,) = ctx.saved_tensors
        return gradients[0] * outer, None, None


class _TwoSets(Parametrization):
    """mask: the set A. outer: the set B. allowed: weights that earlier passes kept, or None for all."""

    mask: Tensor
    outer: Tensor
    allowed: Tensor | None

    def __init__(self, step: TopKAST, allowed: Bool[Tensor, "out in"] | None, shape: tuple[int, int]) -> None:
        super().__init__()
        self.step = step
        self.register_buffer("allowed", allowed)
        for name in ("mask", "outer"):
            self.register_buffer(name, torch.ones(shape, dtype=torch.bool))
        self._resting: Tensor | None = None  # weights outside of B, during the optimizer step

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        return _Forward.apply(weight, self.mask, self.outer)  # type: ignore[return-value]

    def adjust(self, weight: nn.Parameter) -> None:
        self._resting = weight[~self.outer]  # AdamW's moving averages would change them

    def decay(self, weight: nn.Parameter, rate: float) -> None:
        # W - rate * d/dW of penalty * (|W_A|^2 / 2 + |W_{B without A}|^2 / (2 D))
        factor = self.mask + (self.outer & ~self.mask) / self.step.density
        weight.sub_(weight * factor, alpha=rate * self.step.penalty)

    def update(self, weight: nn.Parameter, step: int, total_steps: int) -> Shares:
        if self._resting is not None:
            weight[~self.outer], self._resting = self._resting, None
        if self.allowed is not None:
            weight.mul_(self.allowed)
        old_mask, last_step = self.mask.clone(), round(self.step.explore * total_steps)
        if step == 0 or (step < last_step and step % self.step.every == 0):
            self._choose(weight)
        if step >= last_step:
            self.outer.copy_(self.mask)
        return {} if step == 0 else {"flips": ((old_mask != self.mask).sum(), old_mask.numel())}

    def _choose(self, weight: Float[Tensor, "out in"]) -> None:
        """Choose A and B among all weights."""
        step, score = self.step, magnitudes(weight, self.allowed)
        wide = step.wide(step.pattern)
        self.mask.copy_(step.pattern.keep(score, step.density))
        self.outer.copy_(
            torch.ones_like(self.mask) if wide is None else wide.keep(score, 1 - step.outer_sparsity) | self.mask
        )
        if self.allowed is not None:
            self.mask &= self.allowed
            self.outer &= self.allowed

    def finalize(
        self, weight: Float[Tensor, "out in"], storage: torch.dtype
    ) -> tuple[Float[Tensor, "out in"], Bool[Tensor, "out in"]]:
        return weight * self.mask, self.mask
