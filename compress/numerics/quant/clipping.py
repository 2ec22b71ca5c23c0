"""Learned clipping: gradients move the range that the scale and the zero point of each group cover.

OmniQuant (Shao 2023, arXiv 2308.13137), equation 2: with h = (sigma(gamma) max W - sigma(beta) min W) / (2^N - 1) and
z = -round(sigma(beta) min W / h), the weight is rounded to clamp(round(W / h) + z) in every step.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.numerics.division import divided
from compress.numerics.quant.codes import Codes, fit, grouped, spread, store
from compress.numerics.quant.fake import learned_step, levels, straight
from compress.numerics.quant.rounding import GridOptions

INITIAL = 4.0  # OmniQuant, reference code (quantizer.py): logits of the clipped ranges, sigma(4) = 0.982
NARROWEST, WIDEST = 0.05, 0.99  # initial range of a scale search, relative to that of the weights: sigma(x) < 1


class LearnedClipping:
    """The clipped range of each group of a weight; the logits `upper` and `lower` are the parameters.

    The weight itself is an argument of every step, because a learned scale of its columns may multiply it.

    Args:
        weight: the initial weight.
        options: grid and scales; plain float scales are required. `search` gives the initial range; 'absmax': sigma(4)
            of the whole range, as in the paper.
        mask: True for unpruned weights; the others stay exactly zero.
    """

    def __init__(
        self, weight: Float[Tensor, "out in"], options: GridOptions, mask: Bool[Tensor, "out in"] | None
    ) -> None:
        assert options.grid.free_scales
        self.options, self.mask = options, mask
        low, high = torch.aminmax(grouped(self._kept(weight), options.group_size), dim=-1)
        self.sign = torch.ones_like(high)
        if options.search == "absmax":
            start = torch.full_like(high, INITIAL)
        else:
            start = self._found(self._kept(weight), low, high)
        self.upper, self.lower = start.clone().requires_grad_(), start.clone().requires_grad_()

    def _kept(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        return weight if self.mask is None else weight * self.mask

    def _found(
        self, weight: Float[Tensor, "out in"], low: Float[Tensor, "out groups"], high: Float[Tensor, "out groups"]
    ) -> Float[Tensor, "out groups"]:
        """Return the logits of the searched range, relative to that of the weights, for both ends."""
        options = self.options
        scale, zero = fit(
            weight,
            options.grid,
            options.group_size,
            options.symmetric,
            options.search,
            options.dtype,
            None,
            self.mask,
            options.importance,
            options.signed,
        )
        self.sign = scale.sign()
        lowest, highest = levels(options.grid)
        low, high = low.clamp(max=0), high.clamp(min=0)
        covered = (torch.maximum(-low, high), options.grid.span) if zero is None else (high - low, highest - lowest)
        extent = divided(*covered)
        return torch.logit((scale.abs() / extent.clamp(min=1e-30)).clamp(NARROWEST, WIDEST))

    @property
    def parameters(self) -> list[Tensor]:
        """The learned tensors."""
        return [self.upper, self.lower]

    def steps(self, weight: Float[Tensor, "out in"]) -> tuple[Tensor, Tensor | None]:
        """Return the stored scales and the zero points of the groups of a weight, [out, groups], with gradients."""
        options = self.options
        low, high = torch.aminmax(grouped(weight, options.group_size), dim=-1)
        low, high = torch.sigmoid(self.lower) * low.clamp(max=0), torch.sigmoid(self.upper) * high.clamp(min=0)
        lowest, highest = levels(options.grid)
        with torch.no_grad():
            scale, zero = options.grid.fit(low, high, options.symmetric, options.dtype)
        if zero is None:
            return straight(divided(torch.maximum(-low, high), options.grid.span), scale) * self.sign, None
        scale = straight(divided(high - low, highest - lowest), scale)
        return scale, straight(lowest - low / scale, zero)

    def weight(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Return the rounded weight, with gradients to the logits and to the weight."""
        masked_weight = self._kept(weight)
        scale, zero = self.steps(masked_weight)
        parts = grouped(masked_weight, self.options.group_size)
        zero = None if zero is None else zero[..., None]
        rounded = learned_step(parts, scale[..., None], zero, self.options.grid)
        return rounded.reshape(len(weight), -1)[:, : weight.shape[1]]

    @torch.no_grad()
    def codes(self, weight: Float[Tensor, "out in"]) -> Codes:
        """Return the codes of the nearest values, with the stored scales."""
        options, masked_weight = self.options, self._kept(weight)
        scale, zero = self.steps(masked_weight)
        expanded = (
            None if per_group is None else spread(per_group, weight.shape[1], options.group_size)
            for per_group in (scale, zero)
        )
        step, shift = expanded
        assert step is not None
        return Codes(
            store(options.grid.encode(masked_weight, step, shift), options.grid),
            scale,
            zero,
            options.grid,
            options.group_size,
        )


def clipping_bytes(weights: int, groups: int) -> int:
    """Return the memory of learning the clipping of a weight, in addition to the weight, in bytes.

    Per weight, in float32: the scaled weight, its rounded value, and the gradients of both; per group: two logits,
    their gradients, two moments of each, and the best state.
    """
    return 4 * (4 * weights + 10 * groups)
