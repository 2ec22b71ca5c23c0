"""Activation quantization, optionally with outlier columns that are not quantized."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.numerics.quant.grids import Grid, IntGrid


def round_inputs(
    x: Float[Tensor, "*batch in"],
    grid: Grid,
    scale: Float[Tensor, " 1"] | None = None,
    outliers: Bool[Tensor, " in"] | None = None,
    symmetric: bool = True,
    group: int | None = None,
    clip: float = 1.0,
) -> Float[Tensor, "*batch in"]:
    """Round an activation to the nearest values of a grid.

    Integers are computed in float32: in a half dtype x / scale would be rounded before it is rounded to an integer,
    which is 1 to 11% more error with int8. 8-bit floats with plain scales are computed in the dtype of x, as their
    readers do.

    Args:
        x: the activation.
        grid: the number grid.
        scale: static scale for all tokens; of a grid whose scales share a number (NVFP4), that number. None: one per
            token, from its largest magnitude (ZeroQuant, Yao 2022, section 3.2), or, with symmetric False, a scale and
            a zero point from its range.
        outliers: True for columns that are not quantized.
        symmetric: whether to quantize without zero points.
        group: number of columns that share a scale of a token, a divisor of the width; None: all.
        clip: fraction of the largest magnitude (or of the range) that a computed scale covers (QuaRot, arXiv
            2404.00456, section 5: 0.9 for 4 bits).

    Returns:
        The dequantized activation, in the dtype of x.
    """
    if group is not None:
        assert outliers is None, "outlier columns have no groups"
        return round_inputs(x.unflatten(-1, (-1, group)), grid, scale, None, symmetric, clip=clip).flatten(-2)
    dtype = _computed_in(grid, x)
    inside = (x if outliers is None else x.masked_fill(outliers, 0)).to(dtype)
    zero = None
    if scale is None or grid.scaling.fused:
        low, high = torch.aminmax(inside, dim=-1, keepdim=True)
        low, high = clip * low, clip * high
        shared = scale
        if grid.scaling.fused and scale is None:
            shared = grid.scaling.shared_per_token(_largest(low, high), grid.span)
        scale, zero = grid.fit(low, high, symmetric, dtype, shared)
    else:
        scale = scale.to(dtype)
    rounded = grid.decode(grid.encode(inside, scale, zero), scale, zero).to(x.dtype)
    return rounded if outliers is None else torch.where(outliers, x, rounded)


def round_in_groups(
    x: Float[Tensor, "*batch in"],
    grid: Grid,
    index: Int[Tensor, " in"],
    groups: int,
    scale: Float[Tensor, " groups"] | None = None,
    zero: Int[Tensor, " groups"] | None = None,
    symmetric: bool = True,
    clip: float = 1.0,
) -> Float[Tensor, "*batch in"]:
    """Round an activation to a grid with a scale, and a zero point unless symmetric, for each group of channels.

    Channel j of group g becomes (code_j - zero_g) * scale_g, as in per-embedding-group quantization (Bondarenko 2021,
    section 4) and in RPTQ (Yuan 2023, clustering of channels).

    Args:
        x: the activation.
        grid: the number grid.
        index: the group of every channel.
        groups: number of groups.
        scale: static scales for all tokens; None: computed from the range of each token's group.
        zero: static zero points for all tokens.
        symmetric: whether to quantize without zero points.
        clip: as in `round_inputs`.
    """
    dtype = _computed_in(grid, x)
    inside = x.to(dtype)
    if scale is None:
        low, high = group_ranges(inside, index, groups)
        scale, zero = grid.fit(clip * low, clip * high, symmetric, dtype)
    scale, zero = scale.to(dtype)[..., index], None if zero is None else zero[..., index]
    return grid.decode(grid.encode(inside, scale, zero), scale, zero).to(x.dtype)


def group_ranges(
    x: Float[Tensor, "*batch in"], index: Int[Tensor, " in"], groups: int
) -> tuple[Float[Tensor, "*batch groups"], Float[Tensor, "*batch groups"]]:
    """Return the range of each group of channels, extended to zero; a group without channels has [0, 0]."""
    expanded_index, start = index.expand(x.shape), x.new_zeros(*x.shape[:-1], groups)
    return start.scatter_reduce(-1, expanded_index, x, "amin"), start.scatter_reduce(-1, expanded_index, x, "amax")


def _computed_in(grid: Grid, x: Tensor) -> torch.dtype:
    """Return the dtype of computation: float32 for integers, 4 bits and coded scales, otherwise that of x."""
    return torch.float32 if isinstance(grid, IntGrid) or grid.bits <= 4 else grid.computes_in(x.dtype)


def _largest(low: Float[Tensor, "*batch 1"], high: Float[Tensor, "*batch 1"]) -> Float[Tensor, "*tokens 1 1"]:
    """Return the largest magnitude of all groups of each token; the axis before the last one is that of groups."""
    return torch.maximum(-low, high).amax(-2, keepdim=True)


def outlier_columns(
    x: Float[Tensor, "*batch in"], threshold: float | None, columns: Bool[Tensor, " in"] | None
) -> Bool[Tensor, " in"] | None:
    """Return the columns that are not quantized in this call (LLM.int8, Dettmers 2022, section 3.2).

    Args:
        x: the activation.
        threshold: a column with any magnitude of at least this is an outlier; None: no threshold.
        columns: columns that are always outliers.

    Returns:
        True for outliers; None if there never are any.
    """
    if threshold is None:
        return columns
    large = (x.abs() >= threshold).reshape(-1, x.shape[-1]).any(0)
    return large if columns is None else columns | large
