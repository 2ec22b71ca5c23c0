"""Number grids: the finite sets of values that a weight or an activation may take.

A grid says which values exist (times a scale, plus a zero point for integers); how scales are shared out over
a weight (tensor, channel, group) is `codes`, and which layout stores them is `formats`.

Conventions for integers (those of compressed-tensors): codes q lie in [-2^(b-1), 2^(b-1) - 1];
symmetric scale = absmax / ((qmax - qmin) / 2); asymmetric scale = (max - min) / (2^b - 1) with
zero = clamp(round(qmin - min / scale)); q = clamp(round_half_even(w / scale + zero)); w ~ (q - zero) * scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid(ABC):
    """A set of representable values, closed under a positive scale.

    name: its key in a recipe. bits: storage per value.
    """

    name: str
    bits: int

    @property
    @abstractmethod
    def symmetric_only(self) -> bool:
        """True when the grid has no zero point."""

    @abstractmethod
    def fit(self, low: Tensor, high: Tensor, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """(scale, zero) that cover the range [low, high], the scale rounded to `dtype` as it will be stored.

        low, high: any one shape; scale and zero have that shape. zero is None when symmetric.
        """

    @abstractmethod
    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The codes of the nearest grid values, as whole numbers in the dtype of `values`."""

    @abstractmethod
    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """The values that codes stand for, in the dtype of `scale`."""


def _nonzero(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A scale as stored: rounded to `dtype`; zero (an all-zero group, or underflow) becomes that dtype's eps."""
    stored = scale.to(dtype)
    return torch.where(stored == 0, torch.finfo(dtype).eps, stored).to(scale.dtype)


@dataclass(frozen=True)
class IntGrid(Grid):
    """Signed integers of `bits` bits, with an optional integer zero point in the same range."""

    @property
    def symmetric_only(self) -> bool:
        return False

    @property
    def lowest(self) -> int:
        """The smallest code, -2^(bits-1)."""
        return -(2 ** (self.bits - 1))

    @property
    def highest(self) -> int:
        """The largest code, 2^(bits-1) - 1."""
        return 2 ** (self.bits - 1) - 1

    def fit(self, low: Tensor, high: Tensor, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        steps = self.highest - self.lowest
        low, high = low.clamp(max=0), high.clamp(min=0)  # zero is always representable
        if symmetric:
            return _nonzero(torch.maximum(-low, high) / (steps / 2), dtype), None
        scale = _nonzero((high - low) / steps, dtype)
        zero = torch.round(self.lowest - low / scale).clamp(self.lowest, self.highest)
        return scale, zero

    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        codes = values / scale
        if zero is not None:
            codes = codes.add_(zero)
        return codes.round_().clamp_(self.lowest, self.highest)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        codes = codes.to(scale.dtype)
        return (codes if zero is None else codes - zero.to(scale.dtype)) * scale


@dataclass(frozen=True)
class LevelGrid(Grid):
    """A sorted table of levels times a scale; the code is the index into the table."""

    levels: tuple[float, ...] = ()

    @property
    def symmetric_only(self) -> bool:
        return True

    def fit(self, low: Tensor, high: Tensor, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return _nonzero(torch.maximum(-low, high).clamp(min=0) / max(map(abs, self.levels)), dtype), None

    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        levels = torch.tensor(self.levels, dtype=values.dtype, device=values.device)
        # The nearest level: count the midpoints below the value.
        return torch.bucketize(values / scale, (levels[1:] + levels[:-1]) / 2).to(values.dtype)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        levels = torch.tensor(self.levels, dtype=scale.dtype, device=scale.device)
        return levels[codes.long()] * scale


@dataclass(frozen=True)
class Float8Grid(Grid):
    """An 8-bit float; the code is its bit pattern (0..255), rounding is to nearest even with saturation."""

    dtype: torch.dtype = torch.float8_e4m3fn

    @property
    def symmetric_only(self) -> bool:
        return True

    def fit(self, low: Tensor, high: Tensor, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return _nonzero(torch.maximum(-low, high).clamp(min=0) / torch.finfo(self.dtype).max, dtype), None

    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        top = torch.finfo(self.dtype).max
        return (values / scale).clamp_(-top, top).to(self.dtype).view(torch.uint8).to(values.dtype)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return codes.to(torch.uint8).view(self.dtype).to(scale.dtype) * scale


# QLoRA (Dettmers 2023), appendix E: quantiles of N(0, 1), normalized to [-1, 1], with an exact zero.
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
E2M1_POSITIVE = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_LEVELS = (*(-v for v in reversed(E2M1_POSITIVE)), 0.0, *E2M1_POSITIVE)

GRIDS: dict[str, Grid] = {
    **{f"int{bits}": IntGrid(f"int{bits}", bits) for bits in range(2, 9)},
    "fp8_e4m3": Float8Grid("fp8_e4m3", 8, torch.float8_e4m3fn),
    "fp8_e5m2": Float8Grid("fp8_e5m2", 8, torch.float8_e5m2),
    "fp4_e2m1": LevelGrid("fp4_e2m1", 4, E2M1_LEVELS),
    "nf4": LevelGrid("nf4", 4, NF4_LEVELS),
}
