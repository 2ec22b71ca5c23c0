"""How scales are stored: the representable values of a scale, independent of the grid of its weights.

A group of weights with an extent (largest magnitude, or range) and a grid with a span (its largest level, or its
number of steps) need the scale extent / span. `round` returns the scale in its stored precision, so that codes are
computed from the scale that a reader will see. `encode` and `decode` convert to the stored form and back, exactly for
such scales. In some kinds all scales of a matrix share a few numbers; `fit_shared` computes them first, from the whole
matrix.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from compress.numerics.division import divided


@dataclass(frozen=True)
class Scaling(ABC):
    """A way to store scales. `round` takes extents of any shape; elsewhere scales are [out, groups]."""

    @property
    def stored(self) -> torch.dtype | None:
        """The dtype of stored scales; None: the storage dtype of the run."""
        return torch.uint8

    @property
    def free(self) -> bool:
        """Whether any positive float can be a scale, so that gradients can train it."""
        return False

    @property
    def signed(self) -> bool:
        """Whether a scale may be negative, so that a symmetric grid of integers can reach further on either side."""
        return False

    @property
    def super_block(self) -> int:
        """The number of consecutive scales of a row that share a step; a row has a multiple of it."""
        return 1

    @property
    def fused(self) -> bool:
        """Whether matrices that read the same input must have the same shared numbers."""
        return False

    @property
    def whole_groups(self) -> bool:
        """Whether all groups of a row must have equally many columns."""
        return False

    @property
    def shared_dtype(self) -> torch.dtype:
        """The stored dtype of the shared numbers."""
        return torch.float32

    @property
    def from_scales(self) -> bool:
        """Whether the shared numbers follow from scales and minima that were fitted as floats (`shared_of`)."""
        return False

    def stored_width(self, groups: int) -> int:
        """Return how many stored numbers a row with `groups` groups has."""
        return groups

    def shared_count(self, rows: int, groups: int) -> int:
        """Return the number of values that all scales of a matrix share."""
        return 0

    def shared_of(
        self, scale: Float[Tensor, "out groups"], minimum: Float[Tensor, "out groups"] | None
    ) -> Float[Tensor, " n"] | None:
        """Compute the shared numbers for scales, and minima at most zero, that were fitted as floats."""
        return None

    def fit_shared(
        self, extent: Float[Tensor, "out groups"], span: float, shared_absmax: float | None
    ) -> Float[Tensor, " n"] | None:
        """Compute the shared numbers of a matrix from the extents of its groups.

        Args:
            extent: largest magnitude of each group.
            span: `Grid.span`.
            shared_absmax: largest magnitude among all matrices that share the numbers; None: of this matrix alone.
        """
        return None

    def shared_per_token(self, largest: Tensor, span: float) -> Tensor | None:
        """Compute the shared number of the scales of each token of an activation.

        Args:
            largest: largest magnitude of each token.
            span: `Grid.span`.

        Returns:
            The shared numbers; None if the scales share none.
        """
        return None

    def part(
        self, shared: Float[Tensor, " n"] | None, rows: int, groups: int, group: int
    ) -> Float[Tensor, " n"] | None:
        """Return the shared numbers that apply to one group of columns."""
        return shared

    @abstractmethod
    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        """Return the stored scale nearest to extent / span, always positive, in the dtype of `extent`."""

    def round_minimum(self, minimum: Tensor, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        """Return the stored minimum nearest to `minimum`, in its dtype, for grids with minima (`OffsetGrid`)."""
        return minimum.to(dtype).to(minimum.dtype)

    def encode_minimum(self, minimum: Tensor, shared: Tensor | None) -> Tensor:
        """Convert minima that `round_minimum` returned to their stored form."""
        return minimum

    def decode_minimum(self, stored: Tensor, shared: Tensor | None) -> Tensor:
        """Convert stored minima back."""
        return stored

    @abstractmethod
    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        """Convert scales that `round` returned to their stored form."""

    @abstractmethod
    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        """Convert stored scales back."""


def positive(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to a float dtype, finite and above zero; the result has the dtype of the input.

    Zero (a group of zeros) becomes the dtype's eps, as in compressed-tensors. A scale that underflows becomes the
    smallest positive number; one that overflows becomes the largest.
    """
    info = torch.finfo(dtype)
    largest = min(info.max, torch.finfo(scale.dtype).max)
    stored = scale.clamp(max=largest).to(dtype).to(scale.dtype)
    stored = torch.where(stored == 0, info.smallest_normal * info.eps, stored)
    return torch.where(scale == 0, info.eps, stored)


def power(exponents: Tensor) -> Float[Tensor, "*any"]:
    """Compute 2^exponent, exact in float32 for exponents from -149 to 127."""
    exponent = exponents.to(torch.int32)  # a GPU's powers of two are not all exact: these are the bits of a float32
    small = torch.ones_like(exponent) << (exponent + 149).clamp(0, 22)  # subnormal
    return torch.where(exponent < -126, small, (exponent + 127) << 23).view(torch.float32)


@dataclass(frozen=True)
class FloatScale(Scaling):
    """A number of the storage dtype.

    Attributes:
        either_sign: whether it may be negative.
    """

    either_sign: bool = False

    @property
    def signed(self) -> bool:
        return self.either_sign

    @property
    def stored(self) -> torch.dtype | None:
        return None

    @property
    def free(self) -> bool:
        return True

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        return positive(divided(extent, span), dtype)

    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        return scale

    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        return stored


@dataclass(frozen=True)
class PowerOfTwo(FloatScale):
    """A power of two in the storage dtype, rounded up (ZeroQuant-FP, Wu 2023, section 3, constraint M1)."""

    @property
    def free(self) -> bool:
        return False

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        scale = divided(extent, span)
        fraction, exponent_above = torch.frexp(scale)  # scale = fraction * 2^above, 0.5 <= fraction < 1
        top = math.frexp(torch.finfo(dtype).max)[1] - 1
        next_power = power((exponent_above - (fraction == 0.5).to(exponent_above.dtype)).clamp(-149, top)).to(
            scale.dtype
        )
        return positive(torch.where(scale == 0, scale, next_power), dtype)


@dataclass(frozen=True)
class E8M0(Scaling):
    """An exponent in a byte, 2^(e - 127) (OCP Microscaling formats 1.0, section 5.4.1).

    Rounding follows compressed-tensors: the exponent is that of the extent minus that of the span, but an extent whose
    mantissa is at least `carry` counts as the next power of two. The plain rule of the standard would clip such an
    extent most (7.5 would become 6 of E2M1).

    Attributes:
        carry: smallest mantissa, in [1, 2), that is rounded up.
    """

    carry: float = 1.75

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        mantissa, exponent_above = torch.frexp(extent.float())  # extent = half * 2^above, 0.5 <= half < 1
        exponent = (
            exponent_above - 1 + (2 * mantissa >= self.carry).to(exponent_above.dtype) - math.floor(math.log2(span))
        )
        exponent = torch.where(extent == 0, -127, exponent)
        return power(exponent.clamp(-127, 127)).to(extent.dtype)

    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        return (torch.frexp(scale.float()).exponent - 1 + 127).to(torch.uint8)

    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        return power(stored.to(torch.int32) - 127)


@dataclass(frozen=True)
class Float8Scale(Scaling):
    """An 8-bit float divided by one float32 number of the matrix: scale = fp8 / shared (NVFP4).

    shared = 448 * span / absmax, so that the scale of the largest group is the largest 8-bit float.
    """

    @property
    def fused(self) -> bool:
        return True

    def shared_count(self, rows: int, groups: int) -> int:
        return 1

    def fit_shared(
        self, extent: Float[Tensor, "out groups"], span: float, shared_absmax: float | None
    ) -> Float[Tensor, " n"] | None:
        largest = extent.max().float() if shared_absmax is None else torch.tensor(shared_absmax, device=extent.device)
        return self.shared_per_token(largest, span).reshape(1)

    def shared_per_token(self, largest: Tensor, span: float) -> Tensor:
        shared = torch.finfo(torch.float8_e4m3fn).max * span / largest
        return torch.where(shared.isfinite(), shared, 1.0)  # 1: a matrix of (nearly) zeros

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        shared = self.fit_shared(extent, span, None) if shared is None else shared
        assert shared is not None
        return positive(divided(extent, span) * shared, torch.float8_e4m3fn) / shared

    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        assert shared is not None
        return (scale * shared).to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        assert shared is not None
        return stored.view(torch.float8_e4m3fn).float() / shared


@dataclass(frozen=True)
class DoubleScale(Scaling):
    """A byte per scale, times a float32 step per 256 scales, plus their mean (QLoRA, Dettmers 2023, section 3).

    scale = mean + (byte - 128) * step[block]. Blocks divide the scales row by row. The shared numbers are
    [mean, step, step, ...]; for a part of a matrix they contain one step per scale. The bytes are evenly spaced; the
    paper
    does not say which 8-bit float it uses.
    """

    block: int = 256
    largest: ClassVar[float] = 127  # the step of a block times this is its largest distance from the mean

    def shared_count(self, rows: int, groups: int) -> int:
        return 1 + math.ceil(rows * groups / self.block)

    def fit_shared(
        self, extent: Float[Tensor, "out groups"], span: float, shared_absmax: float | None
    ) -> Float[Tensor, " n"] | None:
        scales = divided(extent, span).flatten().float()
        mean = scales.mean()
        deviation = torch.nn.functional.pad((scales - mean).abs(), (0, -scales.numel() % self.block))
        steps = divided(deviation.view(-1, self.block).amax(1), self.largest)
        return torch.cat([mean[None], torch.where(steps == 0, 1.0, steps)])

    def part(
        self, shared: Float[Tensor, " n"] | None, rows: int, groups: int, group: int
    ) -> Float[Tensor, " n"] | None:
        assert shared is not None
        return torch.cat([shared[:1], self._steps(shared, (rows, groups))[:, group]])

    def _steps(self, shared: Float[Tensor, " n"], shape: tuple[int, ...]) -> Float[Tensor, "out groups"]:
        """Return the step of each scale."""
        steps, count = shared[1:], math.prod(shape)
        if steps.numel() != count:
            steps = steps.repeat_interleave(self.block)[:count]
        return steps.view(shape)

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        shared = self.fit_shared(extent, span, None) if shared is None else shared
        assert shared is not None
        mean, steps = shared[0], self._steps(shared, tuple(extent.shape))
        codes = torch.round((divided(extent, span) - mean) / steps).clamp(-127, 127)
        codes = codes + (mean + codes * steps <= 0)  # scales are positive
        return mean + codes * steps

    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        assert shared is not None
        codes = torch.round((scale - shared[0]) / self._steps(shared, tuple(scale.shape))).clamp(-127, 127)
        return (codes + 128).to(torch.uint8)

    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        assert shared is not None
        return shared[0] + (stored.float() - 128) * self._steps(shared, tuple(stored.shape))


def dynamic_levels() -> Float[Tensor, " 256"]:
    """Return the signed dynamic 8-bit numbers (Dettmers 2016, arXiv 1511.04561), sorted, as bitsandbytes computes them.

    Seven decades below 1; the decade 10^-i has 2^(6-i) evenly spaced numbers per sign. 0 and 1 are added.
    """
    levels: list[float] = []
    for i in range(7):
        borders = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        means = (borders[:-1] + borders[1:]) / 2.0
        for sign in (1, -1):
            levels += (sign * 10 ** (i - 6) * means).tolist()
    return torch.tensor(sorted([*levels, 0.0, 1.0]))


@dataclass(frozen=True)
class DynamicDoubleScale(DoubleScale):
    """As `DoubleScale`, with bytes that are dynamic 8-bit numbers: the double quantization of bitsandbytes.

    scale = mean + level[byte] * extent[block]. The shared numbers are [mean, extent, extent, ...].
    """

    largest: ClassVar[float] = 1

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        shared = self.fit_shared(extent, span, None) if shared is None else shared
        assert shared is not None
        mean, steps = shared[0], self._steps(shared, tuple(extent.shape))
        levels = dynamic_levels().to(extent.device)
        lowest_byte = torch.bucketize(-mean / steps, levels, right=True)  # scales are positive
        nearest = self._nearest((divided(extent, span) - mean) / steps)
        scale = mean + levels[torch.maximum(nearest, lowest_byte).clamp(max=255)] * steps
        return torch.where(scale > 0, scale, mean + steps)

    def _nearest(self, values: Tensor) -> Tensor:
        """Return the bytes of the nearest levels."""
        levels = dynamic_levels().to(values.device)
        return torch.bucketize(values.float().contiguous(), (levels[1:] + levels[:-1]) / 2)

    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        assert shared is not None
        steps = self._steps(shared, tuple(scale.shape))
        codes = self._nearest((scale - shared[0]) / steps).to(torch.uint8)
        is_inexact = self.decode(codes, shared) != scale  # small levels vanish next to the mean: search by scale
        if bool(is_inexact.any()):
            candidates = shared[0] + dynamic_levels().to(scale.device) * steps[is_inexact][:, None]
            codes[is_inexact] = (candidates - scale[is_inexact][:, None]).abs().argmin(-1).to(torch.uint8)
        return codes

    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        assert shared is not None
        return shared[0] + dynamic_levels().to(stored.device)[stored.long()] * self._steps(shared, tuple(stored.shape))
