"""Top-KAST: always sparse training, forward by the largest weights, backward by some more (Jayakumar 2021)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from compress.families.training import SparseTrainingPass
from compress.model.linear import CompressedLinear
from compress.numerics.sparse.masks import Pattern
from compress.train.parametrization import Parametrization, Shares, magnitudes


class TopKAST(SparseTrainingPass):
    """Multiply by the largest weights alone (the set A); train these and the next largest (B), which may come in.

    Weights outside of B stay as they are. The exploration penalty, on the square of the weights and with the weight
    `penalty`, counts once in A and 1/D times in B without A, where D is the density of A: what is tried has to prove
    itself. In the first stage A and B are chosen anew every few steps among all weights; in the second, refinement,
    they are fixed and B is A. With an N:M pattern B keeps more of each M than A. What earlier passes removed stays so.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2106.03517"

    backward_sparsity: float | None = Field(
        default=None, ge=0, lt=1, description="share of the weights that get no gradient; half of sparsity if not given"
    )
    penalty: float = Field(default=1e-4, ge=0, description="weight of the exploration penalty")
    explore: float = Field(default=0.5, ge=0, le=1, description="share of the steps before masks are fixed")
    every: int = Field(default=1, ge=1, description="steps between two choices of the masks")

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.behind >= self.target_sparsity:
            raise ValueError(
                f"backward_sparsity {self.behind:g} must be below sparsity, {self.target_sparsity:g}: "
                "more weights are trained than multiplied by"
            )
        if self.pattern.n_of_m is not None and self.wide(self.pattern) == self.pattern:
            m = self.pattern.n_of_m[1]
            raise ValueError(
                f"backward_sparsity {self.behind:g} of pattern {self.pattern.text} trains no more weights than are "
                f"kept; lower it by 1/{m} at least"
            )

    @property
    def behind(self) -> float:
        """The sparsity of B."""
        return self.target_sparsity / 2 if self.backward_sparsity is None else self.backward_sparsity

    def wide(self, pattern: Pattern) -> Pattern | None:
        """The pattern of B; None: all weights are in it."""
        if pattern.n_of_m is None:
            return pattern if self.behind else None
        m = pattern.n_of_m[1]
        n = round((1 - self.behind) * m)
        return None if n == m else Pattern(f"{n}:{m}")

    def parametrize(self, name: str, layer: CompressedLinear) -> Parametrization:
        return _TwoSets(self, layer.mask, layer.shape)


class _Forward(torch.autograd.Function):
    """W * A, with a gradient for all of B."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
        ctx.save_for_backward(outer)
        return weight * inner

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (outer,) = ctx.saved_tensors
        return gradients[0] * outer, None, None


class _TwoSets(Parametrization):
    """mask is A, outer is B; allowed: what may be kept at all."""

    mask: Tensor
    outer: Tensor
    allowed: Tensor | None

    def __init__(self, step: TopKAST, allowed: Bool[Tensor, "out in"] | None, shape: tuple[int, int]) -> None:
        super().__init__()
        self.step = step
        self.register_buffer("allowed", allowed)
        for name in ("mask", "outer"):
            self.register_buffer(name, torch.ones(shape, dtype=torch.bool))
        self._resting: Tensor | None = None  # weights outside of B, while the optimizer steps

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        return _Forward.apply(weight, self.mask, self.outer)  # type: ignore[return-value]

    def adjust(self, weight: nn.Parameter) -> None:
        self._resting = weight[~self.outer]  # AdamW's averages would move them
        if weight.grad is not None:
            # d/dW of penalty * (|W_A|^2 / 2 + |W_{B without A}|^2 / (2 D))
            factor = self.mask + (self.outer & ~self.mask) / self.step.density
            weight.grad.add_(weight * factor, alpha=self.step.penalty)

    def update(self, weight: nn.Parameter, done: int, of: int) -> Shares:
        if self._resting is not None:
            weight[~self.outer], self._resting = self._resting, None
        if self.allowed is not None:
            weight.mul_(self.allowed)
        before, last = self.mask.clone(), round(self.step.explore * of)
        if done == 0 or (done < last and done % self.step.every == 0):
            self._choose(weight)
        if done >= last:
            self.outer.copy_(self.mask)
        return {} if done == 0 else {"flips": ((before != self.mask).sum(), before.numel())}

    def _choose(self, weight: Float[Tensor, "out in"]) -> None:
        """A and B among all weights."""
        step, score = self.step, magnitudes(weight, self.allowed)
        wide = step.wide(step.pattern)
        self.mask.copy_(step.pattern.keep(score, step.density))
        self.outer.copy_(torch.ones_like(self.mask) if wide is None else wide.keep(score, 1 - step.behind) | self.mask)
        if self.allowed is not None:
            self.mask &= self.allowed
            self.outer &= self.allowed

    def finalize(
        self, weight: Float[Tensor, "out in"], storage: torch.dtype
    ) -> tuple[Float[Tensor, "out in"], Bool[Tensor, "out in"]]:
        return weight * self.mask, self.mask
