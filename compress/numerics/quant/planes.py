"""Binary planes: a weight is a sum of +-scale, one sign and one scale per plane.

Scales are found per row of a matrix [rows, n], from the weights that share them. Two planes are +-a +-b, a >= b >= 0,
which are the four levels +-(a + b) and +-(a - b).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.linalg import solve_positive


def residual_scales(values: Float[Tensor, "rows n"]) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Binarize the weights, then binarize the residual (BiLLM, Huang 2024, equations 3 to 5).

    The scales are mean |w| and mean |w - mean |w| sign(w)|: each has the least squared error for the other one fixed.

    Returns:
        (a, b), the larger scale first.
    """
    magnitude = values.abs()
    scale = magnitude.mean(1)
    residual_scale = (magnitude - scale[:, None]).abs().mean(1)
    return torch.maximum(scale, residual_scale), torch.minimum(scale, residual_scale)


def residual_error(values: Float[Tensor, "rows n"]) -> Float[Tensor, " rows"]:
    """Return the squared error of binarizing twice: sum w^2 - n (mean |w|)^2 - n (mean |r|)^2 with r the residual."""
    magnitude = values.abs()
    scale = magnitude.mean(1, keepdim=True)
    residual = (magnitude - scale).abs()
    return residual.square().sum(1) - values.shape[1] * residual.mean(1).square()


def split_scales(values: Float[Tensor, "rows n"]) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Binarize the weights in two sets, those below and those above a break point of the magnitude.

    The scale of a set is its mean magnitude, so that its levels are +-(a - b) and +-(a + b). The break point has the
    least squared error of all break points of the row (BiLLM, Huang 2024, equation 9).

    Returns:
        (a, b).
    """
    width = values.shape[1]
    below = values.abs().sort(1).values.cumsum(1)
    count = torch.arange(1, width + 1, device=values.device)
    low, high = below / count, (below[:, -1:] - below) / (width - count).clamp(min=1)
    high = torch.where(count < width, high, low)
    # sum (|w| - mean)^2 of both sets is the sum of squares less the sum of count * mean^2
    at = (count * low.square() + (width - count) * high.square()).argmax(1, keepdim=True)
    low, high = low.gather(1, at)[:, 0], high.gather(1, at)[:, 0]
    return (low + high) / 2, (high - low) / 2


def split_errors(
    values: Float[Tensor, "rows n"], order: Int[Tensor, " n"], counts: Sequence[int]
) -> Iterator[Float[Tensor, " rows"]]:
    """Compute the squared error of the columns order[count:] with the scales of `split_scales`, for each count.

    Magnitudes are sorted once for all counts.
    """
    width = values.shape[1]
    magnitude, column = values.abs().sort(1)
    position = order.argsort()[column]  # [rows, n]: where the column of each sorted magnitude stands in the order
    for count in counts:
        is_included = position >= count
        below, number_below = (magnitude * is_included).cumsum(1), is_included.to(magnitude.dtype).cumsum(1)
        total, number_above = below[:, -1:], (width - count) - number_below
        gain = below.square() / number_below.clamp(min=1) + (total - below).square() / number_above.clamp(min=1)
        yield (magnitude.square() * is_included).sum(1) - gain.amax(1)


def nearest_signs(values: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the signs (1 or -1) of a and b for the nearest of the four levels."""
    sign = torch.where(values > 0, 1.0, -1.0)
    # the levels of the sign of w are a - b and a + b, and a is half-way between them
    return sign, torch.where(values.abs() > a, sign, -sign)


def greedy(values: Float[Tensor, "rows n"], weights: Float[Tensor, " n"], count: int) -> Float[Tensor, "rows planes"]:
    """Compute the scales of `count` planes in turn.

    Each is the weighted mean magnitude of the residual of the previous planes.
    """
    residual, share, scales = values, weights / weights.sum(), []
    for _ in range(count):
        scale = (residual.abs() * share).sum(1, keepdim=True)
        residual = residual - torch.where(residual > 0, scale, -scale)
        scales.append(scale)
    return torch.cat(scales, dim=1)


def alternated(
    values: Float[Tensor, "rows n"], weights: Float[Tensor, " n"], scales: Float[Tensor, "rows planes"], rounds: int
) -> Float[Tensor, "rows planes"]:
    """Improve scales: alternate between signs of the nearest levels and scales by weighted least squares.

    Xu 2018 (arXiv 1802.00150), section 3, algorithm 2. The weighted squared error of no row increases.

    Args:
        values: the weights.
        weights: weight of the squared error of each column.
        scales: initial scales.
        rounds: number of alternations.

    Returns:
        Positive scales in descending order.
    """
    for _ in range(rounds):
        signs = signs_of(nearest_level(values, scales), scales.shape[1])  # [rows, n, planes]
        weighted = signs * weights[:, None]
        # (B^T D B) a = B^T D w; planes that are equal in all weights have no inverse, and stay
        matrix, right_side = signs.transpose(1, 2) @ weighted, (weighted * values[..., None]).sum(1)
        solution, is_solved = solve_positive(matrix, right_side[..., None])
        solution = solution[..., 0]
        is_valid = is_solved & solution.isfinite().all(1) & (solution.abs() < scales.sum(1, keepdim=True)).all(1)
        scales = torch.where(is_valid[:, None], solution.abs(), scales).sort(1, descending=True).values
    return scales


def levels_of(scales: Float[Tensor, "rows planes"]) -> Float[Tensor, "rows levels"]:
    """Return the sums of +-scale; bit i of the index of a level is the sign of plane i (1: plus)."""
    count = scales.shape[1]
    index = torch.arange(2**count, device=scales.device)
    return scales @ signs_of(index, count).T.to(scales.dtype)


def signs_of(index: Int[Tensor, "*any"], planes: int) -> Float[Tensor, "*any planes"]:
    """Return the signs (1 or -1) of every plane for the indices of levels."""
    bits = torch.arange(planes, device=index.device)
    return ((index[..., None] >> bits & 1) * 2 - 1).float()


class Levels:
    """The levels of each row in ascending order: the sums of +-scale, with borders half-way between neighbours.

    Columns that share scales share the levels, so these are computed once for a group.
    """

    def __init__(self, scales: Float[Tensor, "rows planes"]) -> None:
        self._values, self._order = levels_of(scales).sort(dim=1)
        self._borders = ((self._values[:, 1:] + self._values[:, :-1]) / 2).contiguous()

    def nearest(self, values: Float[Tensor, "rows n"]) -> tuple[Int[Tensor, "rows n"], Float[Tensor, "rows n"]]:
        """Return the nearest level of each value; of two equally near ones the lower.

        Returns:
            (index as in `levels_of`, level).
        """
        place = torch.searchsorted(self._borders, values.contiguous())
        return self._order.gather(1, place), self._values.gather(1, place)


def nearest_level(values: Float[Tensor, "rows n"], scales: Float[Tensor, "rows planes"]) -> Int[Tensor, "rows n"]:
    """Return the index of the nearest level of each value."""
    return Levels(scales).nearest(values)[0]
