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

    mask: True where a weight is kept; other weights are exactly zero and get no gradient.
    """

    mask: Tensor | None

    def __init__(self, rounding: GridOptions, mask: Bool[Tensor, "out in"] | None) -> None:
        super().__init__()
        self.rounding = rounding
        self.register_buffer("mask", mask)

    def codes(self, weight: Float[Tensor, "out in"]) -> Codes:
        """Quantize the weight."""
        how = self.rounding
        with torch.no_grad():
            options = how.grid, how.group_size, how.symmetric, how.search, self.mask, how.dtype
            found = quantize(weight, *options, signed=how.signed)
            if not how.grid.centered:
                return found
            scale = spread(found.scale, weight.shape[1], how.group_size)
            return replace(found, codes=store(how.grid.encode(self.centered(weight), scale, None), how.grid))

    def centered(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """The weight whose nearest values are its codes, with the gradient of the weight.

        Sign(W - mean(W)) for a binary grid (Wang 2023, arXiv 2310.11453, equations 1 to 3), so that both codes
        stay in use while the mean moves; the scale is that of W.
        """
        return weight - weight.detach().mean() if self.rounding.grid.centered else weight

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        kept = weight if self.mask is None else weight * self.mask
        return straight(kept, self.codes(weight).dense())

    def update(self, weight: nn.Parameter, done: int, of: int) -> Shares:
        if self.mask is not None:
            weight.mul_(self.mask)
        return {}

    def finalize(self, weight: Float[Tensor, "out in"], storage: torch.dtype) -> tuple[Codes, None]:
        return self.codes(weight), None


class LearnedSteps(FakeQuantized):
    """As `FakeQuantized`, but scales and zero points, if any, are learned (LSQ, Esser 2020).

    `search` fits their initial values, if none are given as `start`. `factor` multiplies each scale; `shift` is added
    to each zero point, in units of the grid's range, so that one learning rate suits both for weights of any size.
    Requires plain float scales.
    """

    own: ClassVar[Kind] = "scales"

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
        """The scales in their stored precision and the integer zero points, with gradients."""
        scale = self.scale * self.factor
        scale = straight(scale, positive(scale.detach(), self.rounding.dtype))
        if self.zero is None or self.shift is None:
            return scale, None
        low, high = levels(self.rounding.grid)
        zero = self.zero + self.shift * (high - low)
        return scale, straight(zero, zero.detach().round().clamp(low, high))

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        kept = weight if self.mask is None else weight * self.mask
        scale, zero = self.steps()
        parts = grouped(self.centered(kept), self.rounding.group_size)
        zero = None if zero is None else zero[..., None]
        found = learned_step(parts, scale[..., None], zero, self.rounding.grid)
        return found.reshape(weight.shape[0], -1)[:, : weight.shape[1]]

    @torch.no_grad()
    def update(self, weight: nn.Parameter, done: int, of: int) -> Shares:
        self.factor.clamp_(min=SMALLEST_FACTOR)
        if self.zero is not None and self.shift is not None:
            low, high = levels(self.rounding.grid)
            self.shift.copy_((self.zero + self.shift * (high - low)).clamp_(low, high).sub_(self.zero).div_(high - low))
        return super().update(weight, done, of)

    @torch.no_grad()
    def finalize(self, weight: Float[Tensor, "out in"], storage: torch.dtype) -> tuple[Codes, None]:
        how, width = self.rounding, weight.shape[1]
        scale, zero = self.steps()
        kept = self.centered(weight if self.mask is None else weight * self.mask)
        every = spread(scale, width, how.group_size), None if zero is None else spread(zero, width, how.group_size)
        return Codes(store(how.grid.encode(kept, *every), how.grid), scale, zero, how.grid, how.group_size), None


class LearnedShifts(LearnedSteps):
    """As `LearnedSteps`, with the weight in units of its initial scales, so that one rate suits all weights."""

    def of(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """A weight in units of the initial scales; `floats` is the inverse."""
        return weight / spread(self.scale, weight.shape[1], self.rounding.group_size)

    def floats(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """The weight as floats."""
        return weight * spread(self.scale, weight.shape[1], self.rounding.group_size)

    def forward(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        return super().forward(self.floats(weight))

    @torch.no_grad()
    def finalize(self, weight: Float[Tensor, "out in"], storage: torch.dtype) -> tuple[Codes, None]:
        return super().finalize(self.floats(weight), storage)
