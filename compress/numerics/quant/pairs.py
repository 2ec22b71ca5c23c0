"""Outlier-victim pairs: 4 bits for each of two neighbours, of which one may be an outlier (OliVe, Guo 2023, section 3).

Integers from -7 to 7 are normal values. The code 8 (the bits of -8) marks a victim, which is zero: then the other code
of the pair is an outlier, a sign and one of 12, 16, 24, 32, 48, 64 and 96: (2 + m) * 2^(e + 2) for a mantissa m of one
bit and an exponent e of two, without the smallest, 8, whose negative has the bits of the mark.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.division import divided
from compress.numerics.quant.codes import GroupSize, grouped, spread
from compress.numerics.quant.scales import positive

BITS = 4
VICTIM = 8
"""The code that marks a victim."""
HIGHEST = 7
"""The largest normal value."""
OUTLIERS = (12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0)
"""The magnitudes of outliers: codes 1 to 7, and 9 to 15 for their negatives."""
STEPS = 48  # scales that are tried, from one with which the largest weight is 96 to one with which it is 7

CHUNK = 1 << 18  # weights whose errors are computed at once

NORMAL, FIRST, SECOND = 0, 1, 2
"""Kinds of pairs: no outlier, the first of both is one, the second is."""


def rounded_normal(values: Tensor) -> Tensor:
    """Round to the nearest normal values."""
    return values.round().clamp(-HIGHEST, HIGHEST)


def rounded_outlier(values: Tensor) -> Tensor:
    """Round to the nearest outliers of the same sign."""
    levels = torch.tensor(OUTLIERS, device=values.device)
    index = torch.bucketize(values.abs().contiguous(), (levels[1:] + levels[:-1]) / 2)
    return torch.where(values < 0, -levels[index], levels[index])


def kinds(left: Tensor, right: Tensor) -> Int[Tensor, "*any"]:
    """Choose the kind of each pair with the least squared error; values are divided by their scales."""
    errors = [
        (rounded_normal(left) - left).square() + (rounded_normal(right) - right).square(),
        (rounded_outlier(left) - left).square() + right.square(),
        left.square() + (rounded_outlier(right) - right).square(),
    ]
    return torch.stack(errors).argmin(0)


def rounded(values: Tensor, kind: Tensor, outlier_kind: int) -> Tensor:
    """Round the values of one side of the pairs.

    Args:
        values: values of one side, divided by their scales.
        kind: kind of each pair.
        outlier_kind: the kind in which this side is the outlier.
    """
    victim_or_outlier = torch.where(kind == outlier_kind, rounded_outlier(values), torch.zeros_like(values))
    return torch.where(kind == NORMAL, rounded_normal(values), victim_or_outlier)


def encode(levels: Float[Tensor, "out in"], victims: Tensor) -> Int[Tensor, "out in"]:
    """Encode rounded values.

    Args:
        levels: the rounded values.
        victims: True where a value is the victim of an outlier.
    """
    magnitudes = torch.tensor(OUTLIERS, device=levels.device)
    outlier = torch.bucketize(levels.abs().contiguous(), magnitudes) + 1 + 8 * (levels < 0)
    codes = torch.where(levels.abs() > HIGHEST, outlier, levels.long() % 16)
    return torch.where(victims, VICTIM, codes).to(torch.uint8)


def decode(codes: Int[Tensor, "out in"], dtype: torch.dtype) -> Float[Tensor, "out in"]:
    """Decode codes; the number of columns is even."""
    pairs = codes.view(*codes.shape[:-1], -1, 2).long()
    normal = ((pairs + 8) % 16 - 8).to(dtype)
    table = torch.tensor((0.0, *OUTLIERS), dtype=dtype, device=codes.device)
    outlier = table[pairs % 8] * torch.where(pairs >= 8, -1, 1)
    is_outlier = (pairs == VICTIM).flip(-1)
    values = torch.where(is_outlier, outlier, normal).masked_fill_(pairs == VICTIM, 0)
    return values.view(codes.shape)


def fit(weight: Float[Tensor, "out in"], group_size: GroupSize, dtype: torch.dtype) -> Float[Tensor, "out groups"]:
    """Compute the scale of each group with the least squared error, rounded to `dtype`."""
    parts = grouped(weight, group_size)
    rows = max(1, CHUNK // parts[0].numel())
    return torch.cat([_fit(part, dtype) for part in parts.split(rows)])


def fit_bytes(rows: int, width: int, group_size: GroupSize) -> int:
    """Return the peak memory of `fit` in bytes: twelve matrices of the size of a chunk."""
    return 12 * 4 * max(rows * width if group_size == "tensor" else width, min(CHUNK, rows * width))


def _fit(parts: Float[Tensor, "rows groups size"], dtype: torch.dtype) -> Float[Tensor, "rows groups"]:
    largest = parts.abs().amax(-1)
    best_error, scale = torch.full_like(largest, torch.inf), positive(divided(largest, HIGHEST), dtype)
    for step in range(STEPS + 1):
        candidate = positive(divided(largest, HIGHEST) * (HIGHEST / OUTLIERS[-1]) ** (step / STEPS), dtype)
        error = _error(parts, candidate)
        scale = torch.where(error < best_error, candidate, scale)
        best_error = torch.minimum(error, best_error)
    return scale


def _error(parts: Float[Tensor, "rows groups size"], scale: Float[Tensor, "rows groups"]) -> Tensor:
    """Return the squared error of each group."""
    left, right = (parts / scale[..., None]).view(*parts.shape[:-1], -1, 2).unbind(-1)
    kind = kinds(left, right)
    squared_error = (rounded(left, kind, FIRST) - left).square() + (rounded(right, kind, SECOND) - right).square()
    return squared_error.sum(-1) * scale.square()


def quantized(
    weight: Float[Tensor, "out in"], scale: Float[Tensor, "out groups"], group_size: GroupSize
) -> Int[Tensor, "out in"]:
    """Quantize a weight; each pair has the kind of the least squared error."""
    scale_of_column = spread(scale, weight.shape[1], group_size)
    pairs = (weight / scale_of_column).view(len(weight), -1, 2)
    kind = kinds(pairs[..., 0], pairs[..., 1])
    levels = torch.stack([rounded(pairs[..., 0], kind, FIRST), rounded(pairs[..., 1], kind, SECOND)], dim=-1)
    victims = torch.stack([kind == SECOND, kind == FIRST], dim=-1)
    return encode(levels.view(weight.shape), victims.view(weight.shape))
