"""Fake quantization: round a weight to a grid in the forward pass, with gradients for the weight and the step sizes.

Without learned step sizes, scales are fitted to the weight in each forward pass, and the gradient passes straight
through (Bengio 2013, arXiv 1308.3432; Ma 2024, arXiv 2402.17764). With learned step sizes, v~ = (q - z) * s where
q = round(v / s + z) within the grid (LSQ, Esser 2020, arXiv 1902.08153, equations 1 to 3; zero points as in LSQ+,
Bhalgat 2020, arXiv 2004.09576, equation 6):

    d v~ / d v = 1 inside the grid's range, 0 outside;
    d v~ / d s = (q - z) - v / s inside, q - z outside;
    d v~ / d z = 0 inside, -s outside.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from compress.numerics.quant.grids import Grid


def levels(grid: Grid) -> tuple[float, float]:
    """Return the lowest and the highest value of a grid at scale 1 without a zero point."""
    extremes = torch.tensor([-1e30, 1e30])
    low, high = grid.decode(grid.encode(extremes, torch.ones(2), None), torch.ones(2), None).tolist()
    return low, high


class _LearnedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
        rounded = grid.decode(grid.encode(values, scale, zero), scale, zero)
        ctx.save_for_backward(values, scale, zero, rounded)
        ctx.levels = levels(grid)
        return rounded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        (gradient,) = gradients
        values, scale, zero, rounded = ctx.saved_tensors
        low, high = ctx.levels
        scaled = values / scale
        shifted = scaled if zero is None else scaled + zero
        inside = (shifted > low) & (shifted < high)
        to_scale = (gradient * (rounded / scale - scaled * inside)).sum(-1, keepdim=True)
        to_zero = None if zero is None else -(gradient * ~inside * scale).sum(-1, keepdim=True)
        return gradient * inside, to_scale, to_zero, None


def learned_step(
    values: Float[Tensor, "rows groups size"],
    scale: Float[Tensor, "rows groups 1"],
    zero: Float[Tensor, "rows groups 1"] | None,
    grid: Grid,
) -> Float[Tensor, "rows groups size"]:
    """Round values to the grid, with LSQ's gradients.

    LSQ multiplies the gradient of a scale by 1 / sqrt(n Q) (section 2.2), so that plain gradient descent changes it, as
    a fraction of itself, as much as weights. AdamW and Lion divide gradients by their size, so the factor is omitted.
    """
    return _LearnedStep.apply(values, scale, zero, grid)  # type: ignore[return-value]


def straight(values: Float[Tensor, "*any"], rounded: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Return `rounded`, bit for bit, with the gradient of `values` (straight-through estimator)."""
    return rounded.detach() + (values - values.detach())
