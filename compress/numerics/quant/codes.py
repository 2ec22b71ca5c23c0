"""Codes: the integer form of a quantized weight, from which every layout is written.

The columns of a weight [out, in] are divided into groups. Each group has one scale (and zero point) per row.
`group_size` is the number of columns of a group: 'channel' makes one group of all columns, and 'tensor' also shares its
scale among all rows. If the group size does not divide the width, the last group is short. With `group_index`, the
columns of a group need not be contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compress.numerics.quant.grids import Grid, IntGrid
from compress.numerics.quant.scales import FloatScale
from compress.numerics.quant.weighted_search import WeightedSearch

GroupSize = int | Literal["channel", "tensor"]

MSE_NORM = 2.4  # GPTQ reference code (quant.py): the exponent of the clipping search
MSE_STEPS = 30  # shrink factors tried per group: 1.00, 0.98, ... 0.40 (the reference: 80 of step 0.01 down to 0.2)
MSE_SHRINK = 0.60  # the largest fraction of the range that is cut off
CHUNK = 1 << 22  # weights per step of a search; limits each temporary tensor to about 16 MiB
GPU_CHUNK = 1 << 25  # weights per step on a GPU, where launches dominate small steps
CACHED = 1 << 17  # weights per step on a CPU, so that the temporary tensors fit into its cache: 2.5 times as fast


class Percentile(BaseModel):
    """Range that leaves out the outermost weights of a group.

    Attributes:
        percentile: fraction of the magnitudes that the range covers; with zero points, of the values at each end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    percentile: float = Field(default=0.999, gt=0.5, le=1)


ScaleSearch = Literal["absmax", "absmean", "mse", "importance"] | Percentile
"""Search for the range that a scale covers."""


def groups_in(width: int, group_size: GroupSize) -> int:
    """Return the number of groups in a row of `width` columns."""
    return math.ceil(width / group_size) if isinstance(group_size, int) else 1


@dataclass(frozen=True, eq=False)
class Codes:
    """A quantized weight.

    Attributes:
        codes: int8 for integer grids, uint8 otherwise.
        scale: one per row and group; [1, 1] for group size 'tensor'.
        zero: zero points (values of a code) or minima in the shape of `scale`, or None. With `float_zeros` they are any
            numbers.
        grid: the number grid of the codes.
        group_size: columns of a group, 'channel' or 'tensor'.
        group_index: the group of each column, int32; None if groups are contiguous.
        shared: float32 numbers that all stored scales share, only for grids that need them (see `fit_shared`).
        float_zeros: whether zero points are any numbers, so that 0 may not be a value of the dequantized weight.
        rows: consecutive rows with equal scales, so that rows x group_size weights form a block. The last block may
            have fewer rows.
    """

    codes: Int[Tensor, "out in"]
    scale: Float[Tensor, "out groups"]
    zero: Float[Tensor, "out groups"] | None
    grid: Grid
    group_size: GroupSize
    group_index: Int[Tensor, " in"] | None = None
    shared: Float[Tensor, " n"] | None = None
    float_zeros: bool = False
    rows: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Return (out, in)."""
        return self.codes.shape[0], self.codes.shape[1]

    @classmethod
    def of_rows(cls, parts: Sequence[Codes]) -> Codes:
        """Concatenate codes along the rows; every row has its own scales."""
        zeros = [part.zero for part in parts if part.zero is not None]
        return replace(
            parts[0],
            codes=torch.cat([part.codes for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
            zero=torch.cat(zeros) if zeros else None,
        )

    def dense(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "out in"]:
        """Dequantize the weight to `dtype`: (code - zero) * scale."""
        width, wide = self.codes.shape[1], self.grid.computes_in(dtype)
        scale = spread(self.scale.to(wide), width, self.group_size, self.group_index)
        zero = None if self.zero is None else spread(self.zero.to(wide), width, self.group_size, self.group_index)
        return self.grid.decode(self.codes, scale, zero).to(dtype)


@dataclass(frozen=True, eq=False)
class SourceCodes:
    """The codes of a weight in the model that a run starts with.

    Attributes:
        codes: the codes.
        weight: the weight as it was dequantized, in the dtype of computation.
    """

    codes: Codes
    weight: Float[Tensor, "out in"]

    def rows(self, rows: slice) -> SourceCodes:
        """Return the same for some rows of the weight."""
        codes = self.codes
        scale, zero = (t if t is None or len(t) == 1 else t[rows] for t in (codes.scale, codes.zero))
        assert scale is not None
        return SourceCodes(replace(codes, codes=codes.codes[rows], scale=scale, zero=zero), self.weight[rows])

    def kept(self, weight: Float[Tensor, "out in"], like: Codes) -> Codes | None:
        """Return the codes if the weight has not changed and the codes are of the same kind as others; else None.

        Kinds with numbers that all scales share are left out: layers that servers fuse share them, too.

        Args:
            weight: the present weight, in float32.
            like: codes of the target grid.
        """
        kind, target = (
            (c.grid, c.group_size, c.rows, c.float_zeros, c.zero is None, c.group_index is None, c.shared is None)
            for c in (self.codes, like)
        )
        if kind != target or like.shared is not None or not torch.equal(self.weight.float(), weight):
            return None
        return replace(self.codes, scale=self.codes.scale.to(like.scale.dtype))


def spread(
    per_group: Float[Tensor, "out groups"],
    width: int,
    group_size: GroupSize,
    group_index: Int[Tensor, " in"] | None = None,
) -> Float[Tensor, "out in"]:
    """Repeat a value per group for every column of the group.

    Args:
        per_group: scales or zero points.
        width: number of columns.
        group_size: see `Codes`.
        group_index: see `Codes`.

    Returns:
        [out, in], or [out, 1], which broadcasts, if there is a single group.
    """
    if group_index is not None:
        return per_group[:, group_index.long()]
    if per_group.shape[1] == 1 or not isinstance(group_size, int):
        return per_group
    return per_group.repeat_interleave(group_size, dim=1)[:, :width]


def grouped(weight: Float[Tensor, "out in"], group_size: GroupSize) -> Float[Tensor, "rows groups size"]:
    """Split a weight into its groups.

    A short last group is padded with zeros, which change no range and no error.
    """
    rows, width = weight.shape
    if group_size == "tensor":
        return weight.reshape(1, 1, -1)
    size = group_size if isinstance(group_size, int) else width
    missing = groups_in(width, group_size) * size - width
    if missing:
        weight = torch.nn.functional.pad(weight, (0, missing))
    return weight.reshape(rows, -1, size)


def fit_shared(
    weight: Float[Tensor, "out in"],
    grid: Grid,
    group_size: GroupSize,
    shared_absmax: float | None = None,
    search: ScaleSearch = "absmax",
    importance: Float[Tensor, " in"] | None = None,
) -> Float[Tensor, " n"] | None:
    """Compute the numbers that all stored scales of a weight share, before the scales.

    Args:
        weight: the whole weight.
        grid: the number grid.
        group_size: columns of a group.
        shared_absmax: largest magnitude of all weights that share these numbers (`Layer.shared_absmax`); None: of this
            weight alone.
        search: the scale search that will be used. The steps of super-blocks are computed from the scales as floats.
        importance: see `fit`.

    Returns:
        The shared numbers; None if the scales of the grid share none.
    """
    if not grid.scaling.shared_count(1, 1):
        return None
    if grid.scaling.from_scales:
        free = replace(grid, name=f"{grid.name} with floats", scaling=FloatScale(grid.scaling.signed))
        scale, zero = fit(weight, free, group_size, not grid.offset, search, importance=importance)
        return grid.scaling.shared_of(scale, None if zero is None else zero.clamp(max=0))
    extent = grouped(weight, group_size).abs().amax(-1)
    return grid.scaling.fit_shared(extent, grid.span, shared_absmax)


def fit(
    weight: Float[Tensor, "out in"],
    grid: Grid,
    group_size: GroupSize,
    symmetric: bool,
    search: ScaleSearch = "absmax",
    dtype: torch.dtype = torch.float32,
    shared: Float[Tensor, " n"] | None = None,
    mask: Bool[Tensor, "out in"] | None = None,
    importance: Float[Tensor, " in"] | None = None,
    signed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the scale and zero point of each group.

    Args:
        weight: a whole weight, or one of its groups of columns (`Scaling.part`).
        grid: the number grid.
        group_size: columns of a group.
        symmetric: whether to fit without zero points.
        search: 'absmax' covers the whole range. 'mse' shrinks the range of each group to the one with the smallest
            rounding error sum |w - Q(w)|^2.4 (GPTQ reference code, quant.py `find_params`). `Percentile` leaves out the
            outermost weights. 'importance' minimizes the squared error weighted by `importance` (`WeightedSearch`).
            'absmean' uses the mean magnitude as the scale (Ma 2024, arXiv 2402.17764, equation 3).
        dtype: the dtype of scales that are stored as floats.
        shared: the result of `fit_shared` for the whole weight.
        mask: True for unpruned weights. Pruned weights are zero already and do not count in a mean.
        importance: weight of the squared error of each column, for the search 'importance'.
        signed: whether the searches 'mse' and 'importance' also try negative scales for integers without zero points.
            The additional level of the integers is then above zero, not below.

    Returns:
        (scale, zero), [out, groups] each; zero is None if symmetric. Scales are rounded to their stored form.
    """
    tries_both_signs = grid.scaling.signed or (signed and isinstance(grid, IntGrid) and grid.plain)
    parts = grouped(weight, group_size)

    def fit_range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
        return grid.fit(low, high, symmetric, dtype, shared)

    if isinstance(search, Percentile):
        return fit_range(*_percentiles(weight, group_size, symmetric, search.percentile))
    if search == "absmean":
        counts = _sizes(weight, group_size) if mask is None else grouped(mask.to(weight.dtype), group_size).sum(-1)
        extent = parts.abs().sum(-1) / counts.clamp(min=1) * grid.span
        return fit_range(-extent, extent)
    is_searched = grid.offset or (search != "absmax" and not grid.has_zero)
    if is_searched and isinstance(group_size, int) and (tail_width := weight.shape[1] % group_size):
        # the padding of the last group would count as an error, or widen a range that does not contain zero
        importance_parts = (None, None) if importance is None else (importance[:-tail_width], importance[-tail_width:])
        tail_scale, tail_zero = fit(
            weight[:, -tail_width:],
            grid,
            "channel",
            symmetric,
            search,
            dtype,
            importance=importance_parts[1],
            signed=signed,
        )
        if tail_width == weight.shape[1]:
            return tail_scale, tail_zero
        scale, zero = fit(
            weight[:, :-tail_width],
            grid,
            group_size,
            symmetric,
            search,
            dtype,
            importance=importance_parts[0],
            signed=signed,
        )
        joined_zero = None if tail_zero is None or zero is None else torch.cat([zero, tail_zero], dim=1)
        return torch.cat([scale, tail_scale], dim=1), joined_zero
    if search == "importance":
        assert importance is not None and group_size != "tensor"
        group_importance = grouped(importance[None].to(weight.dtype), group_size)[0]
        return WeightedSearch(parts, group_importance, grid, symmetric, dtype, shared, tries_both_signs).best()
    low, high = torch.aminmax(parts, dim=-1)
    if search == "absmax":
        return fit_range(low, high)
    if grid.offset:
        return _least_error_of_ends(parts, grid, low, high, fit_range)
    return _least_error(parts, grid, lambda fraction: fit_range(low * fraction, high * fraction), tries_both_signs)


def fit_blocks(
    weight: Float[Tensor, "out in"],
    grid: Grid,
    group_size: int | Literal["channel"],
    rows: int,
    symmetric: bool,
    search: ScaleSearch = "absmax",
    dtype: torch.dtype = torch.float32,
    signed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute one scale for each block of `rows` x `group_size` weights, repeated for each row of the block.

    Args:
        weight: the weight.
        grid: the number grid; its scales share no numbers.
        group_size: divides the width, or 'channel': one scale for all weights of `rows` rows.
        rows: rows of a block. The last block may have fewer.
        symmetric: see `fit`.
        search: see `fit`.
        dtype: see `fit`.
        signed: see `fit`.

    Returns:
        (scale, zero) as `fit`.
    """
    group_size = weight.shape[1] if group_size == "channel" else group_size
    full_rows = len(weight) // rows * rows
    fitted_parts = []
    for part, height in ((weight[:full_rows], rows), (weight[full_rows:], len(weight) - full_rows)):
        if len(part):
            blocks = part.reshape(len(part) // height, height, -1, group_size).transpose(1, 2)
            size = height * group_size
            scales = fit(blocks.reshape(len(blocks), -1), grid, size, symmetric, search, dtype, signed=signed)
            fitted_parts.append(
                [None if values is None else values.repeat_interleave(height, dim=0) for values in scales]
            )
    scale, zero = ([part for part in parts if part is not None] for parts in zip(*fitted_parts, strict=True))
    return torch.cat(scale), torch.cat(zero) if zero else None


def _sizes(weight: Float[Tensor, "out in"], group_size: GroupSize) -> Float[Tensor, " groups"]:
    """Return the number of weights in each group of a row; the last group may be short."""
    if group_size == "tensor":
        return torch.full((1,), weight.numel(), dtype=weight.dtype, device=weight.device)
    return grouped(torch.ones_like(weight[:1]), group_size).sum(-1)[0]


def _least_error(
    parts: Float[Tensor, "rows groups size"],
    grid: Grid,
    scales: Callable[[float], tuple[Tensor, Tensor | None]],
    signed: bool,
) -> tuple[Tensor, Tensor | None]:
    """Choose the best scale of each group among `scales(fraction of the range)`.

    Args:
        parts: the groups of the weight.
        grid: the number grid.
        scales: maps a fraction of the range to (scale, zero).
        signed: whether to try negative scales too, if there are no zero points.
    """
    scale, zero = scales(1.0)
    best = torch.full_like(scale, math.inf)
    for step in range(MSE_STEPS + 1):
        candidate, candidate_zero = scales(1 - MSE_SHRINK * step / MSE_STEPS)
        for sign in (1, -1) if signed and zero is None else (1,):
            error = _power_error(parts, grid, candidate * sign, candidate_zero)
            better = error < best
            best = torch.where(better, error, best)
            scale = torch.where(better, candidate * sign, scale)
            if zero is not None and candidate_zero is not None:
                zero = torch.where(better, candidate_zero, zero)
    return scale, zero


def _least_error_of_ends(
    parts: Float[Tensor, "rows groups size"],
    grid: Grid,
    low: Tensor,
    high: Tensor,
    scales: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    """Choose the scale and minimum of the best range of each group: move both ends together, then each end alone.

    The distance that an end moves is a fraction of the range, at most MSE_SHRINK / 2.
    """
    best = torch.full_like(low, math.inf)
    best_cuts = [torch.zeros_like(low), torch.zeros_like(low)]
    scale, zero = scales(low, high)
    assert zero is not None, "an offset grid has minima"
    for ends in ((0, 1), (0,), (1,)):
        start = list(best_cuts)
        for step in range(-2 if len(ends) == 1 else 0, MSE_STEPS // 2 + 1):
            cuts = [start[end] + step * MSE_SHRINK / MSE_STEPS if end in ends else start[end] for end in (0, 1)]
            candidate = scales(low + cuts[0] * (high - low), high - cuts[1] * (high - low))
            error = _power_error(parts, grid, *candidate)
            assert candidate[1] is not None
            better = error < best
            best = torch.where(better, error, best)
            best_cuts = [torch.where(better, new, old) for new, old in zip(cuts, best_cuts, strict=True)]
            scale, zero = torch.where(better, candidate[0], scale), torch.where(better, candidate[1], zero)
    return scale, zero


def _power_error(parts: Tensor, grid: Grid, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Sum |w - Q(w)|^MSE_NORM over each group, in chunks of rows (or of one long group)."""
    chunk = CACHED if parts.device.type == "cpu" else GPU_CHUNK
    rows = max(1, chunk // parts[0].numel())
    columns = max(1, chunk // parts.shape[1]) if rows == 1 else parts.shape[2]
    errors = torch.zeros_like(scale)
    for top in range(0, parts.shape[0], rows):
        at = slice(top, top + rows)
        step, shift = scale[at, :, None], None if zero is None else zero[at, :, None]
        for part in parts[at].split(columns, dim=-1):
            rounded = grid.decode(grid.encode(part, step, shift), step, shift)
            errors[at] += (rounded - part).abs_().pow_(MSE_NORM).sum(-1)
    return errors


def _percentiles(weight: Tensor, group_size: GroupSize, symmetric: bool, percentile: float) -> tuple[Tensor, Tensor]:
    """Return the range of `percentile` of a group's magnitudes, or of its values at each end if not symmetric.

    Each limit is the weight of rank ceil(percentile * size), without interpolation.

    Returns:
        (low, high), [out, groups] each.
    """
    width = weight.shape[1]
    full_width = width // group_size * group_size if isinstance(group_size, int) else width
    if 0 < full_width < width:  # ranks in the short last group are computed separately
        limits = [
            _percentiles(part, group_size, symmetric, percentile)
            for part in (weight[:, :full_width], weight[:, full_width:])
        ]
        lows, highs = zip(*limits, strict=True)
        return torch.cat(lows, dim=1), torch.cat(highs, dim=1)
    parts = grouped(weight, group_size if full_width else "channel")
    rank = math.ceil(percentile * parts.shape[-1])
    if symmetric:
        high = parts.abs().kthvalue(rank, dim=-1).values
        return -high, high
    return -(-parts).kthvalue(rank, dim=-1).values, parts.kthvalue(rank, dim=-1).values


def quantize(
    weight: Float[Tensor, "out in"],
    grid: Grid,
    group_size: GroupSize = "channel",
    symmetric: bool = True,
    search: ScaleSearch = "absmax",
    mask: Bool[Tensor, "out in"] | None = None,
    dtype: torch.dtype = torch.float32,
    shared_absmax: float | None = None,
    rows: int = 1,
    signed: bool = False,
) -> Codes:
    """Round every weight to the nearest value of the grid.

    Args:
        weight: the weight.
        grid: the number grid.
        group_size: columns of a group.
        symmetric: whether to quantize without zero points.
        search: see `fit`.
        mask: True for unpruned weights; the others become zero.
        dtype: the dtype of scales that are stored as floats.
        shared_absmax: see `fit_shared`.
        rows: rows that share their scales. More than one needs a group size that divides the width, or 'channel', and a
            grid whose scales share no numbers.
        signed: see `fit`.
    """
    if mask is not None:
        weight = weight * mask
    shared = fit_shared(weight, grid, group_size, shared_absmax, search)
    if rows > 1:
        assert group_size != "tensor" and shared is None
        scale, zero = fit_blocks(weight, grid, group_size, rows, symmetric, search, dtype, signed)
    else:
        scale, zero = fit(weight, grid, group_size, symmetric, search, dtype, shared, mask, signed=signed)
    width = weight.shape[1]
    codes = grid.encode(
        weight, spread(scale, width, group_size), None if zero is None else spread(zero, width, group_size)
    )
    return Codes(store(codes, grid), scale, zero, grid, group_size, shared=shared, rows=rows)


def store(codes: Tensor, grid: Grid) -> Tensor:
    """Cast codes to the dtype of `Codes.codes`: int8 for integer grids, uint8 (index, bit pattern) otherwise."""
    return codes.to(torch.int8 if isinstance(grid, IntGrid) else torch.uint8)


def vanished(weight: Float[Tensor, "out in"], codes: Codes) -> int:
    """Count the groups that became all zero because the scale they need is too small to store."""
    order = None if codes.group_index is None else codes.group_index.argsort(stable=True)

    def largest(values: Tensor) -> Tensor:
        low, high = grouped(values if order is None else values[:, order], codes.group_size).aminmax(dim=-1)
        return torch.maximum(-low, high)

    weight_max = largest(weight)
    has_tiny_scale = (weight_max > 0) & (
        codes.scale.abs() > 2.5 * weight_max / codes.grid.span
    )  # powers of two may be twice as large
    return int((has_tiny_scale & (largest(codes.dense()) == 0)).count_nonzero()) if bool(has_tiny_scale.any()) else 0
