"""The reference kernels in plain torch: unpack, dequantize, multiply. Slow is allowed, wrong is not: the oracle.

Sparse weights are multiplied out some rows at a time, so that beside the dense weight only little is held; the product
is that of the dense masked weight, bit for bit.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.quant.codes import spread
from compress.numerics.quant.grids import IntGrid
from compress.numerics.quant.packed import PackedCodes
from compress.numerics.sparse.positions import SparseWeight


def dense_weight(weight: PackedCodes | SparseWeight, dtype: torch.dtype) -> Float[Tensor, "out in"]:
    """The weight [out, in] that is held packed or sparse, computed in `dtype` as (code - zero) * scale."""
    if isinstance(weight, SparseWeight):
        return weight.dense(dtype)
    scale = weight.scales().to(weight.grid.computes_in(dtype))
    if weight.kept is None:
        everything = slice(None)
        return _dequantized(weight.stored_codes(everything, everything), weight, scale, weight.zero, dtype)
    found = torch.empty(weight.shape, dtype=dtype, device=weight.words.device)
    one_scale = scale.shape[0] == 1
    for rows, mask, where in weight.kept.parts():
        codes = torch.zeros(mask.shape, dtype=torch.uint8, device=mask.device)
        codes.masked_scatter_(mask, weight.stored_codes(rows, where))
        part = slice(None) if one_scale else rows
        zero = None if weight.zero is None else weight.zero[part]
        found[rows] = _dequantized(codes, weight, scale[part], zero, dtype).masked_fill_(~mask, 0)
    return found


def _dequantized(
    codes: Int[Tensor, "rows in"], packed: PackedCodes, scale: Tensor, zero: Tensor | None, dtype: torch.dtype
) -> Float[Tensor, "rows in"]:
    """Rows of the weight from their unsigned codes, and the scales and zero points of these rows."""
    rows, width = codes.shape
    if not isinstance(packed.grid, IntGrid):
        scale = spread(scale, width, packed.group_size, packed.group_index)
        return packed.grid.decode(codes, scale, None).to(dtype)
    # The codes are stored from 0 up; whole numbers below 256 are exact in every float dtype.
    values = codes.to(dtype).add_(packed.grid.lowest)
    groups = scale.shape[1]
    if packed.group_index is None and groups > 1 and width % groups == 0 and packed.group_size == width // groups:
        parts = values.view(rows, groups, -1)
        if zero is not None:
            parts.sub_(zero.to(dtype)[..., None])
        parts.mul_(scale[..., None])
        return values
    if zero is not None:
        values.sub_(spread(zero.to(dtype), width, packed.group_size, packed.group_index))
    return values.mul_(spread(scale, width, packed.group_size, packed.group_index))


def linear(
    x: Float[Tensor, "*batch in"], weight: PackedCodes | SparseWeight, bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "*batch out"]:
    """x W^T + bias with W multiplied out in the dtype of x."""
    return torch.nn.functional.linear(x, dense_weight(weight, x.dtype), bias)
