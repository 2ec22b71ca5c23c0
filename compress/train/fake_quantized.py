"""Train weights through fake quantization: the forward pass uses the dequantized weights."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from compress.numerics.quant.codes import Codes, grouped, quantize, spread, store
from compress.numerics.quant.fake import learned_step, levels, straight
from compress.numerics.quant.rounding import GridOptions
from compress.numerics.quant.scales import positive
from compress.train.linear import SMALLEST_FACTOR
from compress.train.parametrization import Kind, Parametrization, Shares


class FakeQuantized(Parametrization):
    """Round W to nearest in every forward pass, with scales fitted to W and a straight-through gradient.

    Attributes:
        rounding: grid and options of the quantizer.
        mask: True for weights that are not pruned; pruned weights are exactly zero and get no gradient.
    """

    mask: Tensor | None

    def __init__(self, rounding: GridOptions, mask: Bool[Tensor, "out in"] | None) -> None:
        super().__init__()
        self.rounding = rounding
        self.register_buffer("mask", mask)

    def codes(self, weight: Float[Tensor, "out in"]) -> Codes:
        """Quantize the weight."""
        options = self.rounding
        with torch.no_grad():
            arguments = options.grid, options.group_size, options.symmetric, options.search, self.mask, options.dtype
            codes = quantize(weight, *arguments, signed=options.signed)
            if not options.grid.centered:
                return codes
            scale = spread(codes.scale, weight.shape[1], options.group_size)
            return replace(codes, codes=store(options.grid.encode(self.centered(weight), scale, None), options.grid))

    def centered(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Return the weight whose nearest grid values are its codes, with the gradient of the weight.

        Sign(W - mean(W)) for a binary grid (Wang 2023, arXiv 2310.11453, equations 1 to 3), so that both codes stay in
        use while the mean changes; the scale is that of W.
        """
        return weight - weight.detach().mean() if self.rounding.grid.centered else weight

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        masked_weight = weight if self.mask is None else weight * self.mask
        return straight(masked_weight, self.codes(weight).dense())

    def update(self, weight: nn.Parameter, step: int, total_steps: int) -> Shares:
        if self.mask is not None:
            weight.mul_(self.mask)
        return {}

    def finalize(self, weight: Float[Tensor, "out in"], storage: torch.dtype) -> tuple[Codes, None]:
        return self.codes(weight), None


class LearnedSteps(FakeQuantized):
    """`FakeQuantized` with learned scales and zero points, if any (LSQ, Esser 2020).

    `factor` multiplies each scale. `shift` is added to each zero point, in units of the grid's range, so that one
    learning rate suits both for weights of any size. Requires plain float scales.

    Attributes:
        scale: initial scales.
        zero: initial zero points, or None.
        factor: trained factor of each scale.
        shift: trained shift of each zero point, or None.
    """

    parameter_kind: ClassVar[Kind] = "scales"

    scale: Tensor
    zero: Tensor | None

    def __init__(
        self,
        rounding: GridOptions,
        mask: Bool[Tensor, "out in"] | None,
        weight: Float[Tensor, "out in"],
        start: Codes | None = None,
    ) -> None:
        super().__init__(rounding, mask)
        assert rounding.grid.free_scales
        start = start or self.codes(weight)
        self.register_buffer("scale", start.scale)
        self.register_buffer("zero", start.zero)
        self.factor = nn.Parameter(torch.ones_like(start.scale))
        self.shift = None if start.zero is None else nn.Parameter(torch.zeros_like(start.zero))

    def steps(self) -> tuple[Float[Tensor, "out groups"], Float[Tensor, "out groups"] | None]:
        """Return the scales in their stored precision and the integer zero points, with gradients."""
        scale = self.scale * self.factor
        scale = straight(scale, positive(scale.detach(), self.rounding.dtype))
        if self.zero is None or self.shift is None:
            return scale, None
        low, high = levels(self.rounding.grid)
        zero = self.zero + self.shift * (high - low)
        return scale, straight(zero, zero.detach().round().clamp(low, high))

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        masked_weight = weight if self.mask is None else weight * self.mask
        scale, zero = self.steps()
        groups = grouped(self.centered(masked_weight), self.rounding.group_size)
        zero = None if zero is None else zero[..., None]
        quantized = learned_step(groups, scale[..., None], zero, self.rounding.grid)
        return quantized.reshape(weight.shape[0], -1)[:, : weight.shape[1]]

    @torch.no_grad()
    def update(self, weight: nn.Parameter, step: int, total_steps: int) -> Shares:
        self.factor.clamp_(min=SMALLEST_FACTOR)
        if self.zero is not None and self.shift is not None:
            low, high = levels(self.rounding.grid)
            self.shift.copy_((self.zero + self.shift * (high - low)).clamp_(low, high).sub_(self.zero).div_(high - low))
        return super().update(weight, step, total_steps)

    @torch.no_grad()
    def finalize(self, weight: Float[Tensor, "out in"], storage: torch.dtype) -> tuple[Codes, None]:
        options, width = self.rounding, weight.shape[1]
        scale, zero = self.steps()
        masked_weight = self.centered(weight if self.mask is None else weight * self.mask)
        scale_and_zero = (
            spread(scale, width, options.group_size),
            None if zero is None else spread(zero, width, options.group_size),
        )
        return Codes(
            store(options.grid.encode(masked_weight, *scale_and_zero), options.grid),
            scale,
            zero,
            options.grid,
            options.group_size,
        ), None


class LearnedShifts(LearnedSteps):
    """`LearnedSteps` with the weight in units of its initial scales, so that one learning rate suits all weights."""

    def of(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Convert a weight to units of the initial scales; `floats` is the inverse."""
        return weight / spread(self.scale, weight.shape[1], self.rounding.group_size)

    def floats(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Convert a weight from units of the initial scales to floats."""
        return weight * spread(self.scale, weight.shape[1], self.rounding.group_size)

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        return super().forward(self.floats(weight))

    @torch.no_grad()
    def finalize(self, weight: Float[Tensor, "out in"], storage: torch.dtype) -> tuple[Codes, None]:
        return super().finalize(self.floats(weight), storage)
