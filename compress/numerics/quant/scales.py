"""How scales are stored: the numbers that a scale itself may be, apart from the grid of the weights it belongs to.

A group of weights whose extent (largest magnitude, or range) is shared out over the span of a grid (its largest level,
or its number of steps) wants the scale extent / span. `round` gives the scale that will be read back instead, so that
codes are computed from it; `encode` and `decode` are the way to the file and back, exact for such scales. Some kinds
have numbers that all scales of a matrix share; they are found beforehand, from the whole matrix, by `share`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Scaling(ABC):
    """A way to store scales. The shape of extents and scales is any in `round`, [out, groups] elsewhere."""

    @property
    def stored(self) -> torch.dtype | None:
        """The dtype of stored scales; None when it is the storage dtype of the run."""
        return torch.uint8

    @property
    def free(self) -> bool:
        """Whether every positive float can be a scale, so that gradients can move it."""
        return False

    @property
    def fused(self) -> bool:
        """Whether matrices that read the same input must have the shared numbers in common."""
        return False

    def shared_count(self, scales: int) -> int:
        """How many float32 numbers a matrix with so many scales has in common."""
        return 0

    def fit_shared(
        self, extent: Float[Tensor, "out groups"], span: float, shared_absmax: float | None
    ) -> Float[Tensor, " n"] | None:
        """The shared numbers for a matrix of these extents.

        peak: the largest magnitude among all matrices that are to share them, if there are others.
        """
        return None

    def part(
        self, shared: Float[Tensor, " n"] | None, rows: int, groups: int, group: int
    ) -> Float[Tensor, " n"] | None:
        """The shared numbers as they concern one group of columns alone."""
        return shared

    @abstractmethod
    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        """The scale nearest to what covers the extent, always positive, as it will be read back, in extent's dtype."""

    @abstractmethod
    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        """Stored scales, for scales that `round` gave."""

    @abstractmethod
    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        """The scales that stored ones stand for."""


def positive(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales rounded to a float dtype, finite and above zero, in the dtype they come in.

    Zero (a group of zeros) becomes the dtype's eps, as in compressed-tensors; what underflows becomes the smallest
    positive number, what overflows the largest.
    """
    facts = torch.finfo(dtype)
    top = min(facts.max, torch.finfo(scale.dtype).max)
    stored = scale.clamp(max=top).to(dtype).to(scale.dtype)
    stored = torch.where(stored == 0, facts.smallest_normal * facts.eps, stored)
    return torch.where(scale == 0, facts.eps, stored)


def power(exponents: Tensor) -> Float[Tensor, "*any"]:
    """2^e, exact in float32 for -149 <= e <= 127."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


@dataclass(frozen=True)
class FloatScale(Scaling):
    """A number of the storage dtype."""

    @property
    def stored(self) -> torch.dtype | None:
        return None

    @property
    def free(self) -> bool:
        return True

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        return positive(extent / span, dtype)

    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        return scale

    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        return stored


@dataclass(frozen=True)
class PowerOfTwo(FloatScale):
    """A power of two in the storage dtype, the next one above (ZeroQuant-FP, Wu 2023, section 3, constraint M1)."""

    @property
    def free(self) -> bool:
        return False

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        scale = extent / span
        fraction, above = torch.frexp(scale)  # scale = fraction * 2^above, 0.5 <= fraction < 1
        top = math.frexp(torch.finfo(dtype).max)[1] - 1
        raised = power((above - (fraction == 0.5).to(above.dtype)).clamp(-149, top)).to(scale.dtype)
        return positive(torch.where(scale == 0, scale, raised), dtype)


@dataclass(frozen=True)
class E8M0(Scaling):
    """An exponent in a byte, 2^(e - 127) (OCP Microscaling formats 1.0, section 5.4.1).

    It is rounded as compressed-tensors does: the exponent is that of the extent less that of the span, but an extent
    whose mantissa is at least `carry` counts as the next power of two, where the plain rule of the standard would clip
    it most (7.5 would become 6 of E2M1).
    """

    carry: float = 1.75

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        half, above = torch.frexp(extent.float())  # extent = half * 2^above, 0.5 <= half < 1
        wanted = above - 1 + (2 * half >= self.carry).to(above.dtype) - math.floor(math.log2(span))
        wanted = torch.where(extent == 0, -127, wanted)
        return power(wanted.clamp(-127, 127)).to(extent.dtype)

    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        return (torch.frexp(scale.float()).exponent - 1 + 127).to(torch.uint8)

    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        return power(stored.to(torch.int32) - 127)


@dataclass(frozen=True)
class Float8Scale(Scaling):
    """An 8-bit float divided by one float32 number for the matrix: scale = fp8 / shared (NVFP4).

    shared = 448 * span / peak, so that the scale of the largest group is the largest 8-bit float.
    """

    @property
    def fused(self) -> bool:
        return True

    def shared_count(self, scales: int) -> int:
        return 1

    def fit_shared(
        self, extent: Float[Tensor, "out groups"], span: float, shared_absmax: float | None
    ) -> Float[Tensor, " n"] | None:
        top = torch.finfo(torch.float8_e4m3fn).max
        largest = extent.max().float() if shared_absmax is None else torch.tensor(shared_absmax, device=extent.device)
        shared = top * span / largest
        return torch.where(shared.isfinite(), shared, 1.0).reshape(1)  # 1: a matrix of (nearly) zeros

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        shared = self.fit_shared(extent, span, None) if shared is None else shared
        assert shared is not None
        return positive(extent / span * shared, torch.float8_e4m3fn) / shared

    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        assert shared is not None
        return (scale * shared).to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        assert shared is not None
        return stored.view(torch.float8_e4m3fn).float() / shared


@dataclass(frozen=True)
class DoubleScale(Scaling):
    """A byte per scale, times a float32 step per 256 scales, plus their mean (QLoRA, Dettmers 2023, section 3).

    scale = mean + (byte - 128) * step[block]; blocks run over the scales row by row. shared: [mean, step, step, ...];
    for a part of a matrix one step for each scale. The bytes are evenly spaced, where the paper leaves it open which
    8-bit float is meant.
    """

    block: int = 256

    def shared_count(self, scales: int) -> int:
        return 1 + math.ceil(scales / self.block)

    def fit_shared(
        self, extent: Float[Tensor, "out groups"], span: float, shared_absmax: float | None
    ) -> Float[Tensor, " n"] | None:
        scales = (extent / span).flatten().float()
        mean = scales.mean()
        apart = torch.nn.functional.pad((scales - mean).abs(), (0, -scales.numel() % self.block))
        steps = apart.view(-1, self.block).amax(1) / 127
        return torch.cat([mean[None], torch.where(steps == 0, 1.0, steps)])

    def part(
        self, shared: Float[Tensor, " n"] | None, rows: int, groups: int, group: int
    ) -> Float[Tensor, " n"] | None:
        assert shared is not None
        return torch.cat([shared[:1], self._steps(shared, (rows, groups))[:, group]])

    def _steps(self, shared: Float[Tensor, " n"], shape: tuple[int, ...]) -> Float[Tensor, "out groups"]:
        """The step of every scale."""
        steps, count = shared[1:], math.prod(shape)
        if steps.numel() != count:
            steps = steps.repeat_interleave(self.block)[:count]
        return steps.view(shape)

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        shared = self.fit_shared(extent, span, None) if shared is None else shared
        assert shared is not None
        mean, steps = shared[0], self._steps(shared, tuple(extent.shape))
        codes = torch.round((extent / span - mean) / steps).clamp(-127, 127)
        codes = codes + (mean + codes * steps <= 0)  # a scale is above zero
        return mean + codes * steps

    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        assert shared is not None
        codes = torch.round((scale - shared[0]) / self._steps(shared, tuple(scale.shape))).clamp(-127, 127)
        return (codes + 128).to(torch.uint8)

    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        assert shared is not None
        return shared[0] + (stored.float() - 128) * self._steps(shared, tuple(stored.shape))
