"""Learned rounding: gradients move the codes.

A weight is rounded as W~ = Q(W + v * s). The shift v is at most half a step for each weight, and a factor multiplies
the scale s of each group (AutoRound, Cheng 2023, equations 3 to 5; its two factors of the range are one here, because
zero points stay fixed). The backward pass treats rounding as the identity, for any grid.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.numerics.quant.codes import Codes, GroupSize, grouped, store
from compress.numerics.quant.grids import Grid

LIMIT = 0.5  # in steps: a weight is rounded up or down, no further (AutoRound, section 3.2)
FACTORS = (0.5, 1.5)  # bounds of a scale, relative to its initial value


class _Rounded(torch.autograd.Function):
    """Q(target + shift * s) with s = scale * factor; tensors are [rows, groups, size], scales [rows, groups, 1]."""

    @staticmethod
    def forward(ctx: Any, shift: Tensor, factor: Tensor, learned: LearnedRounding) -> Tensor:
        scale = learned.scale * factor
        moved = torch.addcmul(learned.target, shift, scale)
        value = learned.grid.decode(learned.grid.encode(moved, scale, learned.zero), scale, learned.zero)
        inside = (value - moved).abs() <= learned.half_step * scale.abs()
        ctx.save_for_backward(scale, value, inside)
        ctx.learned = learned
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        scale, value, inside = ctx.saved_tensors
        # d value / d scale: the level itself, minus the weight's fixed part where the value is not clipped
        fixed = ctx.learned.target * inside
        if ctx.learned.grid.offset:  # a clipped value keeps its distance from the minimum
            fixed = fixed + ctx.learned.zero * ~inside
        level = value.sub(fixed).mul_(gradient)
        return gradient * scale, level.sum(-1, keepdim=True).div_(scale) * ctx.learned.scale, None


class LearnedRounding:
    """A weight whose rounding is learned; `shift` and `factor` are the parameters.

    Args:
        target: the weight to round.
        start: its initial codes, scales and zero points.
        mask: True for unpruned weights; the others stay exactly zero.
    """

    def __init__(self, target: Float[Tensor, "out in"], start: Codes, mask: Bool[Tensor, "out in"] | None) -> None:
        self.shape = (target.shape[0], target.shape[1])
        self.grid: Grid = start.grid
        self.group_size: GroupSize = start.group_size
        self.start = start
        self.mask = mask
        self.target = grouped(target if mask is None else target * mask, start.group_size)
        self.scale = start.scale[..., None]
        self.zero = None if start.zero is None else start.zero[..., None]
        self.half_step = _half_step(start.grid)
        self.shift = torch.zeros_like(self.target, requires_grad=True)
        self.factor = torch.ones_like(self.scale, requires_grad=start.grid.scaling.free)

    @property
    def parameters(self) -> list[Tensor]:
        """The learned tensors; scales that are not plain floats stay fixed."""
        return [self.shift, self.factor] if self.factor.requires_grad else [self.shift]

    def weight(self) -> Float[Tensor, "out in"]:
        """Return the rounded weight, with gradients."""
        return self._flat(_Rounded.apply(self.shift, self.factor, self))  # type: ignore[arg-type]

    def _flat(self, parts: Tensor) -> Tensor:
        weight = parts.reshape(self.shape[0], -1)[:, : self.shape[1]]
        return weight if self.mask is None else weight * self.mask

    def limit(self) -> None:
        """Clamp the parameters to their bounds, after a step."""
        with torch.no_grad():
            self.shift.clamp_(-LIMIT, LIMIT)
            self.factor.clamp_(*FACTORS)

    def codes(self, storage: torch.dtype) -> Codes:
        """Return the codes, computed from the scales in their stored form."""
        with torch.no_grad():
            scale = self.scale * self.factor
            moved = torch.addcmul(self.target, self.shift, scale)
            if self.factor.requires_grad:
                scale = self.grid.scaling.round(scale * self.grid.span, self.grid.span, storage, None)
            moved = self._flat(moved)
            codes = self.grid.encode(grouped(moved, self.group_size), scale, self.zero)
            codes = codes.reshape(self.shape[0], -1)[:, : self.shape[1]].contiguous()
        start = self.start
        return replace(start, codes=store(codes, self.grid), scale=scale[..., 0])


def learned_bytes(weights: int, moments: int | None) -> int:
    """Return the memory that learning the rounding takes in addition to the weight, in bytes.

    Per weight: the weight to round and its shift, in float32, and its code, one byte. With an optimizer also the
    gradient and moments of the shift; and for the backward pass the rounded value, its gradient, and one byte that says
    whether the value is clipped.

    Args:
        weights: number of weights.
        moments: moments per parameter of the optimizer; None: before the first step.
    """
    return (4 * 2 + 1 + (0 if moments is None else 4 * (3 + moments) + 1)) * weights


def _half_step(grid: Grid) -> float:
    """Return half of the largest distance between neighbouring levels of a grid, at scale 1."""
    unit_scale = torch.ones(1)
    levels = grid.decode(
        grid.encode(torch.linspace(-grid.span, grid.span, 4097), unit_scale, None), unit_scale, None
    ).unique()
    return float(levels.diff().max()) / 2 * (1 + 1e-6)
