"""SR-STE: a new N:M mask in every step, and a decay of the pruned weights (Zhou 2021)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor, nn

from compress.layers.linear import CompressedLinear
from compress.numerics.sparse.masks import Pattern
from compress.passes.contract.context import Run
from compress.passes.contract.passes import works_on
from compress.passes.families.training import SparseTrainingPass
from compress.train.parametrization import Parametrization, Shares, magnitudes

# The paper's 2e-4 (section 4) shrinks by exp(-6) in its 600,000 steps of SGD at a mean rate of 0.05. Rates of AdamW are
# those of gradients divided by their size: 1 shrinks by exp(-10) in 10,000 steps at 1e-3.
DECAY = 1.0


class SRSTE(SparseTrainingPass):
    """Train with N:M sparsity: the forward pass uses the N largest of each M weights, and all weights are trained.

    Equation 9 of the paper: W_{t+1} = W_t - rate * (g(W~_t) + decay * (1 - mask_t) * W_t), with W~ = mask * W and g the
    gradient with respect to W~ (straight-through estimator). Pruned weights shrink, so masks become stable.

    The decay is decoupled from the optimizer, as weight decay is in AdamW: the optimizer divides only g by its average.
    decay: 0 is the plain straight-through estimator.
    """

    use_for: ClassVar[str] = "2:4 by training from the dense model, or after sparsegpt with regrow."
    not_for: ClassVar[str] = "Few steps: the mask of sparsegpt, kept fixed by distill, gives the same for less."
    paper: ClassVar[str] = "https://arxiv.org/abs/2102.04010"

    pattern: Pattern = Field(default=Pattern("2:4"), description="N:M, such as '2:4': keep N of each M weights")
    decay: float = Field(
        default=DECAY,
        ge=0,
        description="lambda_W, the decay of the currently pruned weights, as the weight decay of AdamW",
    )
    regrow: bool = Field(
        default=False, description="whether weights that earlier passes removed may become nonzero again"
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.pattern.n_of_m is None:
            raise ValueError(f'pattern {self.pattern.text} is not N:M; write "2:4", or use gmp or top_kast')

    def parametrize(self, name: str, layer: CompressedLinear) -> Parametrization:
        return _Chosen(self, None if self.regrow else layer.mask, layer.shape)

    def apply(self, model: nn.Module, run: Run) -> None:
        layers = [m for n, m in model.named_modules() if isinstance(m, CompressedLinear) and works_on(self, n)]
        stuck = sum(mask is not None and self._fits(mask) for mask in (layer.mask for layer in layers))
        if stuck and not self.regrow:
            message = (
                "these layers were pruned earlier, so their masks do not change; add regrow: true to let them change"
            )
            run.journal.add("fallback", run.label or self.key(), message, layers=stuck)
        super().apply(model, run)

    def _fits(self, mask: Bool[Tensor, "out in"]) -> bool:
        """Return whether a mask keeps at most N of each M weights."""
        return bool((self.pattern.keep(mask.float(), 0.0) | ~mask).all())


class _StraightThrough(torch.autograd.Function):
    """W * mask, with the gradient of the product as the gradient of W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor) -> Tensor:
        return weight * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Chosen(Parametrization):
    """A mask of the largest weights, updated after every step.

    Attributes:
        allowed: weights that may be kept, or None for all.
    """

    mask: Tensor
    allowed: Tensor | None

    def __init__(self, step: SRSTE, allowed: Bool[Tensor, "out in"] | None, shape: tuple[int, int]) -> None:
        super().__init__()
        self.pattern, self.strength = step.pattern, step.decay
        self.register_buffer("allowed", allowed)
        self.register_buffer("mask", torch.ones(shape, dtype=torch.bool))

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        return _StraightThrough.apply(weight, self.mask)  # type: ignore[return-value]

    def decay(self, weight: nn.Parameter, rate: float) -> None:
        # W - rate * lambda_W * (1 - mask) * W: pruned weights become smaller
        weight.sub_(weight * ~self.mask, alpha=rate * self.strength)

    def update(self, weight: nn.Parameter, step: int, total_steps: int) -> Shares:
        if self.allowed is not None:
            weight.mul_(self.allowed)
        chosen = self.pattern.keep(magnitudes(weight, self.allowed), 0.0)
        if self.allowed is not None:
            chosen &= self.allowed
        flips = (chosen != self.mask).sum()
        self.mask.copy_(chosen)
        return {} if step == 0 else {"flips": (flips, chosen.numel())}

    def finalize(
        self, weight: Float[Tensor, "out in"], storage: torch.dtype
    ) -> tuple[Float[Tensor, "out in"], Bool[Tensor, "out in"]]:
        return weight * self.mask, self.mask
