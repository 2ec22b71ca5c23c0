"""Number grids: the finite sets of values that a weight or an activation may take.

A grid defines the representable values (times a scale, plus a zero point for integers). `codes` defines which weights
share a scale (tensor, channel, group), and `formats` defines how scales and codes are stored.

Conventions for integers (those of compressed-tensors): codes q lie in [-2^(b-1), 2^(b-1) - 1];
symmetric scale = absmax / ((qmax - qmin) / 2); asymmetric scale = (max - min) / (2^b - 1) with
zero = clamp(round(qmin - min / scale)); q = clamp(round_half_even(w / scale + zero)); w ~ (q - zero) * scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compress.native.columns import ScaledGrid
from compress.numerics.quant.codebooks import UNIT, Codebook
from compress.numerics.quant.scales import (
    E8M0,
    DoubleScale,
    DynamicDoubleScale,
    Float8Scale,
    FloatScale,
    PowerOfTwo,
    Scaling,
)
from compress.numerics.quant.super_blocks import SuperBlock
from compress.numerics.quant.tiles import TileScale


@dataclass(frozen=True)
class Grid(ABC):
    """A set of representable values, closed under a positive scale.

    Attributes:
        name: key of the grid in a recipe.
        bits: storage per value.
        scaling: which scales are representable and how they are stored.
        group_size: the only group size that the grid allows, if it fixes one.
        averaged: whether a scale is the mean magnitude of its weights by default; a scale search can override this.
        centered: whether training chooses the codes from the weight minus the mean of its matrix.
    """

    name: str
    bits: int
    scaling: Scaling = field(default=FloatScale(), kw_only=True)
    group_size: int | None = field(default=None, kw_only=True)
    averaged: bool = field(default=False, kw_only=True)
    centered: bool = field(default=False, kw_only=True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle a grid by its name: a copy of a layer has the identical grid, not an equal one."""
        if GRIDS.get(self.name) is self:
            return grid_named, (self.name,)
        return super().__reduce_ex__(protocol)

    @property
    @abstractmethod
    def symmetric_only(self) -> bool:
        """True when the grid has no zero point."""

    @property
    def has_zero(self) -> bool:
        """Whether zero is a value of the grid; pruned weights need it."""
        return True

    @property
    @abstractmethod
    def span(self) -> float:
        """The divisor that turns the largest magnitude of a symmetric group into its scale."""

    @property
    def lowest_stored(self) -> int:
        """The smallest code that is stored: integers are signed, table indexes and bit patterns are not."""
        return 0

    @property
    def complete(self) -> bool:
        """Whether every code of `bits` bits is a number of the grid."""
        return True

    def has_values(self, codes: Tensor) -> bool:
        """Return whether all of these unsigned codes are numbers of the grid."""
        return True

    @property
    def offset(self) -> bool:
        """Whether every group has a minimum, which is added to its values, instead of a zero point."""
        return False

    @property
    def block(self) -> int:
        """The number of columns whose scales share numbers; the width of a weight is a multiple of it."""
        together = self.scaling.super_block > 1 or self.scaling.whole_groups
        return self.scaling.super_block * (self.group_size or 1) if together else 1

    @property
    def run(self) -> int:
        """The number of consecutive columns whose codes are chosen together."""
        return 1

    def rounds_inputs(self, in_groups: bool) -> bool:
        """Return whether inputs can be rounded to the grid.

        Args:
            in_groups: whether each group of columns of a token has a scale, so that the scales of a token can share
                numbers.
        """
        shares = self.scaling.shared_count(1, 1) > 0
        return not self.offset and (not shares or (in_groups and self.scaling.fused))

    @property
    def free_scales(self) -> bool:
        """Whether training can learn a scale: it may be any float, and its weights are proportional to it."""
        return self.scaling.free and not self.offset

    @property
    def zero_dtype(self) -> torch.dtype | None:
        """The dtype of stored zero points or minima; None: the storage dtype of the run."""
        return torch.int8

    def encode_zero(self, zero: Tensor, shared: Tensor | None) -> Tensor:
        """Convert zero points or minima to their stored form."""
        return zero.to(torch.int8)

    def decode_zero(self, stored: Tensor, shared: Tensor | None) -> Tensor:
        """Convert stored zero points or minima back."""
        return stored

    @property
    def integers(self) -> tuple[int, int] | None:
        """The lowest and highest code if code = clamp(round(w / scale + zero)) with the value (code - zero) * scale."""
        return None

    def scaled(self, scale: Tensor, zero: Tensor | None) -> ScaledGrid | None:
        """Describe the grid with these scales and zero points to the loops over columns; None if they lack its rule."""
        limits = self.integers
        return None if limits is None else ScaledGrid(limits, scale, zero)

    def computes_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return the compute dtype for weights of `dtype`: `dtype` with plain float scales, otherwise float32."""
        return dtype if self.scaling.stored is None else torch.float32

    @abstractmethod
    def fit(
        self, low: Tensor, high: Tensor, symmetric: bool, dtype: torch.dtype, shared: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the scale and zero point that cover the range [low, high].

        Args:
            low: lower ends of the ranges, of any shape.
            high: upper ends of the ranges.
            symmetric: whether to fit without a zero point.
            dtype: the dtype to which float scales are rounded.
            shared: the numbers that all scales of the matrix share (`Scaling.fit_shared`); None: fitted to these
                ranges.

        Returns:
            (scale, zero) in the shape of `low`; zero is None if symmetric. The scale is rounded to its stored form.
        """

    @abstractmethod
    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the codes of the nearest grid values, as integers in the dtype of `values`."""

    @abstractmethod
    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Dequantize codes, in the dtype of `scale`."""


@dataclass(frozen=True)
class IntGrid(Grid):
    """Signed integers of `bits` bits, with an optional integer zero point in the same range; super-blocks have none."""

    @property
    def symmetric_only(self) -> bool:
        return self.block > 1

    @property
    def lowest_stored(self) -> int:
        return self.lowest

    @property
    def plain(self) -> bool:
        """Whether scales are positive floats, as other programs expect of integers."""
        return self.scaling == FloatScale()

    @property
    def lowest(self) -> int:
        """The smallest code, -2^(bits-1)."""
        return -(2 ** (self.bits - 1))

    @property
    def highest(self) -> int:
        """The largest code, 2^(bits-1) - 1."""
        return 2 ** (self.bits - 1) - 1

    @property
    def integers(self) -> tuple[int, int] | None:
        return self.lowest, self.highest

    @property
    def span(self) -> float:
        return (self.highest - self.lowest) / 2

    def fit(
        self, low: Tensor, high: Tensor, symmetric: bool, dtype: torch.dtype, shared: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        low, high = low.clamp(max=0), high.clamp(min=0)  # zero is always representable
        if symmetric:
            return self.scaling.round(torch.maximum(-low, high), self.span, dtype, shared), None
        scale = self.scaling.round(high - low, self.highest - self.lowest, dtype, shared)
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
class OffsetGrid(Grid):
    """Unsigned integers of `bits` bits with a scale and a minimum: w = code * scale + minimum.

    The minimum replaces the zero point. If scales are integers of super-blocks, the minimum is at most zero.
    """

    @property
    def symmetric_only(self) -> bool:
        return False

    @property
    def has_zero(self) -> bool:
        return False

    @property
    def offset(self) -> bool:
        return True

    @property
    def span(self) -> float:
        return 2**self.bits - 1

    @property
    def zero_dtype(self) -> torch.dtype | None:
        return self.scaling.stored

    def encode_zero(self, zero: Tensor, shared: Tensor | None) -> Tensor:
        return self.scaling.encode_minimum(zero, shared)

    def decode_zero(self, stored: Tensor, shared: Tensor | None) -> Tensor:
        return self.scaling.decode_minimum(stored, shared)

    def fit(
        self, low: Tensor, high: Tensor, symmetric: bool, dtype: torch.dtype, shared: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        low = low if self.scaling.stored is None else low.clamp(max=0)
        minimum = self.scaling.round_minimum(low, dtype, shared)
        return self.scaling.round((high - minimum).clamp(min=0), self.span, dtype, shared), minimum

    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        above = values if zero is None else values - zero
        return (above / scale).round_().clamp_(0, self.span)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        values = codes.to(scale.dtype) * scale
        return values if zero is None else values + zero.to(scale.dtype)


@dataclass(frozen=True)
class SymmetricGrid(Grid):
    """Values around zero without a zero point; the scale is the largest magnitude over the largest level."""

    @property
    def symmetric_only(self) -> bool:
        return True

    def fit(
        self, low: Tensor, high: Tensor, symmetric: bool, dtype: torch.dtype, shared: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return self.scaling.round(torch.maximum(-low, high).clamp(min=0), self.span, dtype, shared), None


def _borders_below(values: Tensor, borders: Tensor) -> Tensor:
    """Count the sorted borders below each value; a transposed tensor is made contiguous first."""
    return torch.bucketize(values.contiguous(), borders)


@dataclass(frozen=True)
class LevelGrid(SymmetricGrid):
    """A sorted table of levels times a scale; the code is the index into the table."""

    levels: tuple[float, ...] = ()

    def scaled(self, scale: Tensor, zero: Tensor | None) -> ScaledGrid | None:
        return ScaledGrid((0, len(self.levels) - 1), scale, None, self.levels)

    @property
    def has_zero(self) -> bool:
        return 0.0 in self.levels

    @property
    def complete(self) -> bool:
        return len(self.levels) == 2**self.bits

    def has_values(self, codes: Tensor) -> bool:
        return codes.numel() == 0 or int(codes.max()) < len(self.levels)

    @property
    def span(self) -> float:
        return max(map(abs, self.levels))

    def fit(
        self, low: Tensor, high: Tensor, symmetric: bool, dtype: torch.dtype, shared: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if not self.has_zero:  # the levels of a group of zeros are as small as the scales allow
            high = high.clamp(min=torch.finfo(high.dtype).tiny)
        below, above = -self.levels[0], self.levels[-1]
        if below == above:
            return super().fit(low, high, symmetric, dtype, shared)
        # the least scale that reaches both ends, of the sign that allows the smaller one
        upright = torch.maximum(-low * (self.span / below), high * (self.span / above))
        mirrored = torch.maximum(high * (self.span / below), -low * (self.span / above))
        scale = self.scaling.round(torch.minimum(upright, mirrored), self.span, dtype, shared)
        return torch.where(mirrored < upright, -scale, scale), None

    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        levels = torch.tensor(self.levels, dtype=values.dtype, device=values.device)
        # The nearest level: count the midpoints below the value.
        return _borders_below(values / scale, (levels[1:] + levels[:-1]) / 2).to(values.dtype)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        levels = torch.tensor(self.levels, dtype=scale.dtype, device=scale.device)
        return levels[codes.long()] * scale


@dataclass(frozen=True)
class RunGrid(LevelGrid):
    """Levels of which only some combinations exist: each run of weights is an entry of a codebook, with signs.

    Codes are indexes into the levels. For `encode`, a run is consecutive along the last dimension.

    Attributes:
        codebook: the entries.
    """

    codebook: Codebook = field(kw_only=True)

    @classmethod
    def of(cls, name: str, codebook: Codebook, scaling: Scaling, group_size: int) -> RunGrid:
        """Return the grid of a codebook."""
        levels = (*(-level for level in reversed(codebook.magnitudes)), *codebook.magnitudes)
        bits = (len(levels) - 1).bit_length()
        return cls(name, bits, levels, scaling=scaling, group_size=group_size, codebook=codebook)

    @property
    def run(self) -> int:
        return UNIT

    def scaled(self, scale: Tensor, zero: Tensor | None) -> ScaledGrid | None:
        return None

    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        scaled = values / scale
        return self.codebook.encode(scaled).view(scaled.shape).to(values.dtype)


@dataclass(frozen=True)
class Float4Grid(SymmetricGrid):
    """E2M1, the 4-bit float of OCP Microscaling 1.0: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

    The code is its bit pattern, sign * 8 + index. Ties go to the even index; values beyond 6 saturate. Zero has two
    codes, and a value that is rounded to zero keeps its sign, as in compressed-tensors.
    """

    @property
    def span(self) -> float:
        return E2M1_POSITIVE[-1]

    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        scaled = (values / scale).float()
        borders = torch.tensor(E2M1_BORDERS, device=values.device)
        return (_borders_below(scaled.abs(), borders) + 8 * torch.signbit(scaled)).to(values.dtype)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        levels = torch.tensor(E2M1_LEVELS, dtype=scale.dtype, device=scale.device)
        return levels[codes.long()] * scale


@dataclass(frozen=True)
class Float8Grid(SymmetricGrid):
    """An 8-bit float; the code is its bit pattern (0 to 255). Values are rounded to nearest even, with saturation."""

    dtype: torch.dtype = torch.float8_e4m3fn

    @property
    def complete(self) -> bool:
        return False

    def has_values(self, codes: Tensor) -> bool:
        largest = torch.tensor(self.span).to(self.dtype).view(torch.uint8)  # larger bit patterns are infinity and NaN
        return codes.numel() == 0 or int((codes & 0x7F).max()) <= int(largest)

    @property
    def span(self) -> float:
        return torch.finfo(self.dtype).max

    def encode(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return (values / scale).clamp_(-self.span, self.span).to(self.dtype).view(torch.uint8).to(values.dtype)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return codes.to(torch.uint8).view(self.dtype).to(scale.dtype) * scale


# QLoRA (Dettmers 2023), appendix E: quantiles of N(0, 1), normalized to [-1, 1], with an exact zero.
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# The FP4 of bitsandbytes 0.50 (functional.py, get_4bit_type): 3 exponents, 1 bit of mantissa, over the largest value.
FP4_BNB_POSITIVE = tuple(value / 12 for value in (0.0625, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0))
FP4_BNB_LEVELS = (*(-value for value in reversed(FP4_BNB_POSITIVE)), 0.0, *FP4_BNB_POSITIVE)
# The non-linear levels of llama.cpp's 4-bit i-quants (ggml-common.h, kvalues_iq4nl): close to the quantiles of a normal
# distribution, in integers, and without a zero.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# The magnitudes of llama.cpp's i-quants (ggml-common.h), divided by 4 for iq3_xxs and 8 for 2 bits, so that
# their scales are the odd multiples 2 s + 1 of d.
IQ3_S_LEVELS = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)
IQ3_XXS_LEVELS = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5)
IQ2_LEVELS = (1.0, 3.125, 5.375)
E2M1_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_LEVELS = (*E2M1_POSITIVE, *(-v for v in E2M1_POSITIVE))
# The largest float32 that rounds to each level except the last: the midpoint below an odd index, which gets no ties,
# and the next smaller float32 below an even one.
E2M1_BORDERS = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)

_GRIDS = (
    *(IntGrid(f"int{bits}", bits) for bits in range(2, 9)),
    Float8Grid("fp8_e4m3", 8, torch.float8_e4m3fn),
    Float8Grid("fp8_e5m2", 8, torch.float8_e5m2),
    Float4Grid("fp4_e2m1", 4),
    Float4Grid("fp4_e2m1_pow2", 4, scaling=PowerOfTwo()),
    Float4Grid("mxfp4", 4, scaling=E8M0(), group_size=32),
    Float4Grid("nvfp4", 4, scaling=Float8Scale(), group_size=16),
    Float8Grid("mxfp8", 8, torch.float8_e4m3fn, scaling=E8M0(), group_size=32),
    LevelGrid("nf4", 4, NF4_LEVELS),
    LevelGrid("ternary", 2, (-1.0, 0.0, 1.0), averaged=True),  # Ma 2024, arXiv 2402.17764, equations 1 to 3
    LevelGrid("binary", 1, (-1.0, 1.0), averaged=True, centered=True),  # Wang 2023, arXiv 2310.11453
    LevelGrid("nf4_dq", 4, NF4_LEVELS, scaling=DoubleScale()),
    IntGrid("int4_signed", 4, scaling=FloatScale(either_sign=True)),  # a scale of either sign, as Q4_0 of llama.cpp
    IntGrid("int5_signed", 5, scaling=FloatScale(either_sign=True)),
    LevelGrid("iq4_nl", 4, IQ4_LEVELS, scaling=FloatScale(either_sign=True)),  # IQ4_NL of llama.cpp
    *(OffsetGrid(f"uint{bits}", bits) for bits in (2, 3, 4, 5, 6, 8)),  # the affine modes of MLX
    # k-quants of llama.cpp (ggml-common.h): super-blocks of 256 weights with 4-, 6- or 8-bit scales
    OffsetGrid("uint2_k", 2, scaling=SuperBlock(16, 15, minima=True), group_size=16),
    IntGrid("int3_k", 3, scaling=SuperBlock(16, 31, -32), group_size=16),
    OffsetGrid("uint4_k", 4, scaling=SuperBlock(8, 63, minima=True), group_size=32),
    OffsetGrid("uint5_k", 5, scaling=SuperBlock(8, 63, minima=True), group_size=32),
    IntGrid("int6_k", 6, scaling=SuperBlock(16, 127, -128), group_size=16),
    LevelGrid("iq4_xs", 4, IQ4_LEVELS, scaling=SuperBlock(8, 31, -32), group_size=32),
    RunGrid.of("iq3_s", Codebook("IQ3_S", 4, IQ3_S_LEVELS, False), SuperBlock(8, 31, odd=True), 32),
    RunGrid.of("iq3_xxs", Codebook("IQ3_XXS", 4, IQ3_XXS_LEVELS, True), SuperBlock(8, 31, odd=True), 32),
    RunGrid.of("iq2_s", Codebook("IQ2_S", 8, IQ2_LEVELS, False), SuperBlock(16, 31, odd=True), 16),
    RunGrid.of("iq2_xs", Codebook("IQ2_XS", 8, IQ2_LEVELS, True), SuperBlock(16, 31, odd=True), 16),
    RunGrid.of("iq2_xxs", Codebook("IQ2_XXS", 8, IQ2_LEVELS, True), SuperBlock(8, 31, odd=True), 32),
    # SpQR (Dettmers 2023, arXiv 2306.03078), section 4: scales and minima in 3 bits for tiles of 16 rows x 16 columns
    *(OffsetGrid(f"uint{bits}_tile", bits, scaling=TileScale(16, 3), group_size=16) for bits in (2, 3, 4)),
    LevelGrid("nf4_bnb_dq", 4, NF4_LEVELS, scaling=DynamicDoubleScale()),
    LevelGrid("fp4_bnb", 4, FP4_BNB_LEVELS),
    LevelGrid("fp4_bnb_dq", 4, FP4_BNB_LEVELS, scaling=DynamicDoubleScale()),
)
GRIDS: dict[str, Grid] = {grid.name: grid for grid in _GRIDS}
"""Every grid by its name in a recipe."""


def grid_named(name: str) -> Grid:
    """Return the grid of this name.

    Raises:
        KeyError: if there is no such grid.
    """
    return GRIDS[name]
