"""HQQ: find scales and zero points that keep most weights nearly exact, without data (Badri & Shaji 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.numerics.quant.codes import Codes, fit, grouped, spread, store
from compress.numerics.quant.grids import IntGrid
from compress.passes.contract.layers import Layer
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Nothing
from compress.passes.families.quantizing import QuantizingPass


class HQQ(QuantizingPass):
    """Quantize without calibration text: find scales and zero points by half-quadratic splitting.

    Minimize ||W - Q(W)||_p^p over scale and zero point, p < 1. W_e approximates the error W - Q(W). Each iteration has
    two half steps:

    - A generalized soft threshold gives W_e.
    - Least squares gives the zero point (and the scale) for W - W_e.

    beta grows by the factor kappa per iteration. A group stops when its mean error no longer decreases. Each step
    rounds the zero point to its stored form, a whole number or a float, so that the scale fits the stored zero point.
    """

    use_for: ClassVar[str] = (
        "4 bits without calibration text. Where zero points may be floats (format native), it loses less than "
        "rounding to nearest."
    )
    not_for: ClassVar[str] = "Models for which calibration text is at hand: gptq loses less at the same bits."
    paper: ClassVar[str] = "https://mobiusml.github.io/hqq_blog/"

    symmetric: bool = Field(default=False, description="no zero point; false adds one per scale (integer grids)")
    norm: float = Field(default=0.7, gt=0, le=1, description="p of the norm; a small p gives few, large errors")
    beta: float = Field(default=10.0, gt=0, description="initial weight of the term that keeps W_e close to the error")
    kappa: float = Field(default=1.01, ge=1, description="factor on beta per iteration")
    iterations: int = Field(default=20, ge=1, le=1000, description="maximum number of iterations per group")
    zero_point: Literal["integer", "float"] = Field(
        default="integer",
        description="'integer': whole numbers, which most layouts support; 'float': as in the original, with a smaller "
        "error; needs save: {format: native}",
    )
    optimize: Literal["zero", "scale", "both"] = Field(
        default="both", description="parameters to optimize; the original optimizes only the zero point"
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if not self.grid.free_scales:
            raise ValueError(
                f"weights: {self.weights} has scales that are not plain floats, but hqq finds float scales; use the "
                "pass rtn"
            )

    def without_effect(self) -> dict[str, str]:
        idle = {"zero_point": "without zero points; leave zero_point out"}
        return super().without_effect() | (idle if self.symmetric else {})

    @property
    def float_zeros(self) -> bool:
        return self.zero_point == "float"

    def memory(self, size: ProblemSize) -> int:
        return 12 * 4 * size.weights  # weight, mask, codes, error and target, with parts of each

    def codes(self, weight: Float[Tensor, "out in"], statistics: Nothing, layer: Layer) -> Codes:
        weight = weight.float() if layer.mask is None else weight.float() * layer.mask
        options = self.symmetric, self.scale, layer.storage
        scale, zero = fit(weight, self.grid, self.group_size, *options, signed=self.signed(layer))
        mask = grouped(torch.ones_like(weight) if layer.mask is None else layer.mask.float(), self.group_size)
        parts, shape = grouped(weight, self.group_size), scale.shape
        flat_zero = None if zero is None else zero.reshape(-1, 1)
        float_zeros = self.zero_point == "float" and layer.mask is None
        if self.zero_point == "float" and not float_zeros:
            layer.log("fallback", "pruned weights must be exactly zero, so zero points of this layer are whole numbers")

        def store_zero(zero: Tensor) -> Tensor:
            if float_zeros:
                return zero.to(layer.storage).to(zero.dtype)
            assert isinstance(self.grid, IntGrid)
            return zero.round_().clamp_(self.grid.lowest, self.grid.highest)

        scale, zero = self._refine(
            parts.flatten(0, 1), mask.flatten(0, 1), scale.reshape(-1, 1), flat_zero, layer.storage, store_zero
        )
        scale, zero = scale.reshape(shape), None if zero is None else zero.reshape(shape)
        width = weight.shape[1]
        spread_zero = None if zero is None else spread(zero, width, self.group_size)
        codes = self.grid.encode(weight, spread(scale, width, self.group_size), spread_zero)
        return Codes(store(codes, self.grid), scale, zero, self.grid, self.group_size, float_zeros=float_zeros)

    def _refine(
        self,
        parts: Float[Tensor, "groups size"],
        mask: Float[Tensor, "groups size"],
        scale: Float[Tensor, "groups 1"],
        zero: Float[Tensor, "groups 1"] | None,
        storage: torch.dtype,
        store_zero: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the best scale and zero point of every group.

        Args:
            mask: 0 for pruned weights and for padding.
        """
        best_scale, best_zero = scale.clone(), None if zero is None else zero.clone()
        best = torch.full_like(scale, torch.inf)
        live = torch.arange(parts.shape[0], device=parts.device)
        beta = self.beta
        for _ in range(self.iterations):
            codes = self.grid.encode(parts, scale, zero)
            error = parts - self.grid.decode(codes, scale, zero)
            total = error.abs().mul_(mask).sum(1, keepdim=True)
            falls = (total < best)[:, 0].nonzero()[:, 0]
            if not len(falls):
                break
            live, best = live[falls], total[falls]
            parts, mask, codes, error, scale = (t[falls] for t in (parts, mask, codes, error, scale))
            best_scale[live] = scale
            if zero is not None and best_zero is not None:
                zero = zero[falls]
                best_zero[live] = zero
            target = parts - shrink(error, beta, self.norm)
            scale, zero = self._step(target, mask, codes, scale, zero, storage, store_zero)
            beta *= self.kappa
        return best_scale, best_zero

    def _step(
        self,
        target: Tensor,
        mask: Tensor,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        storage: torch.dtype,
        store_zero: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Least squares for (codes - zero) scale = target: the scale given the zero point, then the zero point."""
        if self.optimize != "zero" or zero is None:
            levels = self.grid.decode(codes, torch.ones_like(scale), zero).mul_(mask)
            # s = <target, levels> / <levels, levels>
            new_scale = (target * levels).sum(1, keepdim=True) / levels.square().sum(1, keepdim=True)
            new_scale = new_scale.to(storage).to(scale.dtype)
            scale = torch.where((new_scale * scale > 0) & new_scale.isfinite(), new_scale, scale)  # of the same sign
        if self.optimize != "scale" and zero is not None:
            # z = mean(codes - target / s)
            count = mask.sum(1, keepdim=True).clamp_(min=1)
            zero = store_zero(((codes - target / scale) * mask).sum(1, keepdim=True) / count)
        return scale, zero


def shrink(error: Tensor, beta: float, norm: float) -> Tensor:
    """Generalized soft threshold, sign(e) max(0, |e| - |e|^(p-1) / beta): the proximal step of the l_p norm."""
    size = error.abs()
    return torch.relu_(size - size.pow(norm - 1) / beta) * error.sign()
