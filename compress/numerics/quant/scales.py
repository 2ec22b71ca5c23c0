"""How scales are stored: the representable values of a scale, independent of the grid of its weights.

A group of weights with a given extent (largest magnitude, or range) and a grid with a given span (its largest level, or
its number of steps) need the scale extent / span. `round` returns the scale in its stored precision, so that codes are
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
        """The number of consecutive scales of a row that must exist together; rows have a multiple of it."""
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
        """The stored numbers of a row for so many groups."""
        return groups

    def shared_count(self, rows: int, groups: int) -> int:
        """The number of values that all scales of a matrix share."""
        return 0

    def shared_of(
        self, scale: Float[Tensor, "out groups"], minimum: Float[Tensor, "out groups"] | None
    ) -> Float[Tensor, " n"] | None:
        """The shared numbers for scales, and minima at most zero, that were fitted as floats."""
        return None

    def fit_shared(
        self, extent: Float[Tensor, "out groups"], span: float, shared_absmax: float | None
    ) -> Float[Tensor, " n"] | None:
        """The shared numbers for a matrix with these extents.

        shared_absmax: the largest magnitude among all matrices that share the numbers; None: the matrix is alone.
        """
        return None

    def shared_per_token(self, largest: Tensor, span: float) -> Tensor | None:
        """The shared number of the scales of each token of inputs, from its largest magnitude; None: there is none."""
        return None

    def part(
        self, shared: Float[Tensor, " n"] | None, rows: int, groups: int, group: int
    ) -> Float[Tensor, " n"] | None:
        """The shared numbers that apply to one group of columns."""
        return shared

    @abstractmethod
    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        """The stored scale nearest to extent / span, always positive, in extent's dtype."""

    def round_minimum(self, minimum: Tensor, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        """The stored minimum nearest to `minimum`, in its dtype, for grids whose groups have one (`OffsetGrid`)."""
        return minimum.to(dtype).to(minimum.dtype)

    def encode_minimum(self, minimum: Tensor, shared: Tensor | None) -> Tensor:
        """The stored form of minima that `round_minimum` returned."""
        return minimum

    def decode_minimum(self, stored: Tensor, shared: Tensor | None) -> Tensor:
        """The minima of their stored form."""
        return stored

    @abstractmethod
    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        """The stored form of scales that `round` returned."""

    @abstractmethod
    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        """The scales of their stored form."""


def positive(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to a float dtype, finite and above zero; the result has the dtype of the input.

    Zero (a group of zeros) becomes the dtype's eps, as in compressed-tensors. A scale that underflows becomes the
    smallest positive number; one that overflows becomes the largest.
    """
    facts = torch.finfo(dtype)
    top = min(facts.max, torch.finfo(scale.dtype).max)
    stored = scale.clamp(max=top).to(dtype).to(scale.dtype)
    stored = torch.where(stored == 0, facts.smallest_normal * facts.eps, stored)
    return torch.where(scale == 0, facts.eps, stored)


def power(exponents: Tensor) -> Float[Tensor, "*any"]:
    """2^e, exact in float32 for -149 <= e <= 127."""
    e = exponents.to(torch.int32)  # a GPU's powers of two are not all exact: these are the bits of a float32
    small = torch.ones_like(e) << (e + 149).clamp(0, 22)  # subnormal
    return torch.where(e < -126, small, (e + 127) << 23).view(torch.float32)


@dataclass(frozen=True)
class FloatScale(Scaling):
    """A number of the storage dtype. either_sign: it may be negative."""

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
    """A power of two in the storage dtype, the next one above (ZeroQuant-FP, Wu 2023, section 3, constraint M1)."""

    @property
    def free(self) -> bool:
        return False

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        scale = divided(extent, span)
        fraction, above = torch.frexp(scale)  # scale = fraction * 2^above, 0.5 <= fraction < 1
        top = math.frexp(torch.finfo(dtype).max)[1] - 1
        raised = power((above - (fraction == 0.5).to(above.dtype)).clamp(-149, top)).to(scale.dtype)
        return positive(torch.where(scale == 0, scale, raised), dtype)


@dataclass(frozen=True)
class E8M0(Scaling):
    """An exponent in a byte, 2^(e - 127) (OCP Microscaling formats 1.0, section 5.4.1).

    Rounding follows compressed-tensors: the exponent is that of the extent minus that of the span, but an extent whose
    mantissa is at least `carry` counts as the next power of two. The plain rule of the standard would clip such an
    extent most (7.5 would become 6 of E2M1).
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

    scale = mean + (byte - 128) * step[block]; blocks run over the scales row by row. shared: [mean, step, step, ...];
    for a part of a matrix it holds one step per scale. The bytes are evenly spaced; the paper does not say which 8-bit
    float it uses.
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
        apart = torch.nn.functional.pad((scales - mean).abs(), (0, -scales.numel() % self.block))
        steps = divided(apart.view(-1, self.block).amax(1), self.largest)
        return torch.cat([mean[None], torch.where(steps == 0, 1.0, steps)])

    def part(
        self, shared: Float[Tensor, " n"] | None, rows: int, groups: int, group: int
    ) -> Float[Tensor, " n"] | None:
        assert shared is not None
        return torch.cat([shared[:1], self._steps(shared, (rows, groups))[:, group]])

    def _steps(self, shared: Float[Tensor, " n"], shape: tuple[int, ...]) -> Float[Tensor, "out groups"]:
        """The step of each scale."""
        steps, count = shared[1:], math.prod(shape)
        if steps.numel() != count:
            steps = steps.repeat_interleave(self.block)[:count]
        return steps.view(shape)

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        shared = self.fit_shared(extent, span, None) if shared is None else shared
        assert shared is not None
        mean, steps = shared[0], self._steps(shared, tuple(extent.shape))
        codes = torch.round((divided(extent, span) - mean) / steps).clamp(-127, 127)
        codes = codes + (mean + codes * steps <= 0)  # a scale is above zero
        return mean + codes * steps

    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        assert shared is not None
        codes = torch.round((scale - shared[0]) / self._steps(shared, tuple(scale.shape))).clamp(-127, 127)
        return (codes + 128).to(torch.uint8)

    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        assert shared is not None
        return shared[0] + (stored.float() - 128) * self._steps(shared, tuple(stored.shape))


def dynamic_levels() -> Float[Tensor, " 256"]:
    """The signed dynamic 8-bit numbers (Dettmers 2016, arXiv 1511.04561), sorted, as bitsandbytes computes them.

    Seven decades below 1; the decade 10^-i has 2^(6-i) evenly spaced numbers per sign. 0 and 1 are added.
    """
    found: list[float] = []
    for i in range(7):
        borders = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        means = (borders[:-1] + borders[1:]) / 2.0
        for sign in (1, -1):
            found += (sign * 10 ** (i - 6) * means).tolist()
    return torch.tensor(sorted([*found, 0.0, 1.0]))


@dataclass(frozen=True)
class DynamicDoubleScale(DoubleScale):
    """As `DoubleScale`, with bytes that are dynamic 8-bit numbers: the double quantization of bitsandbytes.

    scale = mean + level[byte] * extent[block]. shared: [mean, extent, extent, ...].
    """

    largest: ClassVar[float] = 1

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        shared = self.fit_shared(extent, span, None) if shared is None else shared
        assert shared is not None
        mean, steps = shared[0], self._steps(shared, tuple(extent.shape))
        levels = dynamic_levels().to(extent.device)
        least = torch.bucketize(-mean / steps, levels, right=True)  # a scale is above zero
        nearest = self._nearest((divided(extent, span) - mean) / steps)
        found = mean + levels[torch.maximum(nearest, least).clamp(max=255)] * steps
        return torch.where(found > 0, found, mean + steps)

    def _nearest(self, values: Tensor) -> Tensor:
        """The bytes of the nearest levels."""
        levels = dynamic_levels().to(values.device)
        return torch.bucketize(values.float().contiguous(), (levels[1:] + levels[:-1]) / 2)

    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        assert shared is not None
        steps = self._steps(shared, tuple(scale.shape))
        found = self._nearest((scale - shared[0]) / steps).to(torch.uint8)
        lost = self.decode(found, shared) != scale  # the mean can swallow small levels: find the byte by its scale
        if bool(lost.any()):
            every = shared[0] + dynamic_levels().to(scale.device) * steps[lost][:, None]
            found[lost] = (every - scale[lost][:, None]).abs().argmin(-1).to(torch.uint8)
        return found

    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        assert shared is not None
        return shared[0] + dynamic_levels().to(stored.device)[stored.long()] * self._steps(shared, tuple(stored.shape))
