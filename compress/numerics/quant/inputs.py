"""Rounding of a layer's inputs to a grid, with columns that are left as they are."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.numerics.quant.grids import Grid, IntGrid


def round_inputs(
    x: Float[Tensor, "*batch in"],
    grid: Grid,
    scale: Float[Tensor, " 1"] | None = None,
    spared: Bool[Tensor, " in"] | None = None,
    symmetric: bool = True,
    group: int | None = None,
    clip: float = 1.0,
) -> Float[Tensor, "*batch in"]:
    """Round inputs to the nearest values of a grid, returned in the dtype of x.

    Integers are computed in float32: in a half dtype x / scale would be rounded before it is rounded to an integer,
    which is 1 to 11% more error with int8. Floats are computed in the dtype of x, as their readers do.
    scale: for all tokens; None: one per token, from its largest magnitude (ZeroQuant, Yao 2022, section 3.2), or, with
    symmetric False, a scale and a zero point from its range. spared: columns that are left as they are. group: columns
    that share a scale of a token (it divides them); None: all. clip: the share of the largest magnitude (or of the
    range) that a computed scale covers (QuaRot, arXiv 2404.00456, section 5: 0.9 for 4 bits). Scales that share a
    number (NVFP4) share that of their token.
    """
    if group is not None:
        assert spared is None, "outlier columns have no groups"
        return round_inputs(x.unflatten(-1, (-1, group)), grid, scale, None, symmetric, clip=clip).flatten(-2)
    dtype = _computed_in(grid, x)
    inside = (x if spared is None else x.masked_fill(spared, 0)).to(dtype)
    zero = None
    if scale is None:
        low, high = torch.aminmax(inside, dim=-1, keepdim=True)
        low, high = clip * low, clip * high
        shared = grid.scaling.shared_per_token(_largest(low, high), grid.span) if grid.scaling.fused else None
        scale, zero = grid.fit(low, high, symmetric, dtype, shared)
    else:
        scale = scale.to(dtype)
    rounded = grid.decode(grid.encode(inside, scale, zero), scale, zero).to(x.dtype)
    return rounded if spared is None else torch.where(spared, x, rounded)


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
    """Round inputs to a grid with a scale, and a zero point unless symmetric, for each group of channels.

    index: the group of every channel. scale, zero: for all tokens; None: computed from the range of each token's group,
    with clip as in `round_inputs`. Channel j of group g becomes (code_j - zero_g) * scale_g, as in per-embedding-group
    quantization (Bondarenko 2021, section 4) and in RPTQ (Yuan 2023, clustering of channels).
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
    """The range of each group of channels, extended to zero; a group without channels has [0, 0]."""
    where, start = index.expand(x.shape), x.new_zeros(*x.shape[:-1], groups)
    return start.scatter_reduce(-1, where, x, "amin"), start.scatter_reduce(-1, where, x, "amax")


def _computed_in(grid: Grid, x: Tensor) -> torch.dtype:
    """The dtype of computation: float32 for integers and for 4 bits, else that of x."""
    return torch.float32 if isinstance(grid, IntGrid) or grid.bits <= 4 else x.dtype


def _largest(low: Float[Tensor, "*batch 1"], high: Float[Tensor, "*batch 1"]) -> Float[Tensor, "*tokens 1 1"]:
    """The largest magnitude of all groups of each token; the axis before the last one is that of groups."""
    return torch.maximum(-low, high).amax(-2, keepdim=True)


def outlier_columns(
    x: Float[Tensor, "*batch in"], threshold: float | None, columns: Bool[Tensor, " in"] | None
) -> Bool[Tensor, " in"] | None:
    """The columns that are not rounded in this call (LLM.int8, Dettmers 2022, section 3.2); None where none ever is.

    threshold: a column is among them if any magnitude in it reaches this. columns: those that always are.
    """
    if threshold is None:
        return columns
    large = (x.abs() >= threshold).reshape(-1, x.shape[-1]).any(0)
    return large if columns is None else columns | large
