"""The reference kernel in plain torch: unpack, dequantize, multiply. Slow is allowed, wrong is not: the oracle."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compress.numerics.bits import unpack
from compress.numerics.codes import spread
from compress.numerics.grids import IntGrid
from compress.numerics.packed import PackedCodes


def dense_weight(packed: PackedCodes, dtype: torch.dtype) -> Float[Tensor, "out in"]:
    """The weight [out, in] that packed codes stand for, computed in `dtype` as (code - zero) * scale."""
    rows, width = packed.shape
    codes = unpack(packed.words, packed.grid.bits, width)
    scale = packed.scales().to(packed.grid.computes_in(dtype))
    if not isinstance(packed.grid, IntGrid):
        scale = spread(scale, width, packed.group_size, packed.group_index)
        return packed.grid.decode(codes, scale, None).to(dtype)
    # The codes are stored from 0 up; whole numbers below 256 are exact in every float dtype.
    values = codes.to(dtype).add_(packed.grid.lowest)
    groups = scale.shape[1]
    if packed.group_index is None and groups > 1 and width % groups == 0 and packed.group_size == width // groups:
        parts = values.view(rows, groups, -1)
        if packed.zero is not None:
            parts.sub_(packed.zero.to(dtype)[..., None])
        parts.mul_(scale[..., None])
        return values
    if packed.zero is not None:
        values.sub_(spread(packed.zero.to(dtype), width, packed.group_size, packed.group_index))
    return values.mul_(spread(scale, width, packed.group_size, packed.group_index))


def linear(
    x: Float[Tensor, "*batch in"], packed: PackedCodes, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "*batch out"]:
    """x W^T + bias with W dequantized in the dtype of x."""
    return torch.nn.functional.linear(x, dense_weight(packed, x.dtype), bias)
