"""Refine a sum of binary planes after its sweep: all scales by least squares together, then coordinate descent.

As `refine`, but a column's value is chosen among all sums of the planes at once, and the scales of all planes are found
together: plane by plane, both would end in worse minima.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.quant.codes import Codes, spread, store
from compress.numerics.quant.planes import Levels, signs_of
from compress.numerics.quant.refine import descend
from compress.numerics.quant.scales import positive

CHUNK = 1 << 22  # numbers of the normal equations of a chunk of rows
RIDGE = 1e-4  # far below the least eigenvalue of planes that differ in one of 64 signs, far above rounding errors
STEPS = 3  # each leaves about RIDGE of the distance to the solution


def refined_planes(
    weight: Float[Tensor, "out in"],
    planes: Sequence[Codes],
    hessian: Float[Tensor, "in in"],
    rounds: int,
    dtype: torch.dtype,
    order: Int[Tensor, " in"] | None = None,
) -> list[Codes]:
    """The planes after some rounds; the error of no row increases.

    planes: binary codes with scales for the same groups. hessian: damped, positive definite. dtype: of stored scales.
    order: of the columns in coordinate descent; None: as they come.
    """
    weight, first = weight.float(), planes[0]
    width, groups = weight.shape[1], first.scale.shape[1]
    order = torch.arange(width, device=weight.device) if order is None else order
    index = first.group_index
    if index is None:
        index = spread(torch.arange(groups)[None], width, first.group_size).expand(1, width)[0]
    index = index.long().to(weight.device)
    signs = torch.stack([plane.codes.float() * 2 - 1 for plane in planes])  # [planes, out, in]
    scales = torch.stack([plane.scale.float() for plane in planes], dim=-1)  # [out, groups, planes]
    for _ in range(rounds):
        scales = _rescaled(weight, hessian, signs, index, scales, dtype)
        signs = _descended(weight, hessian, signs, index, scales, order)
    return [
        replace(plane, codes=store(own > 0, plane.grid), scale=scales[..., i].contiguous())
        for i, (plane, own) in enumerate(zip(planes, signs, strict=True))
    ]


def planes_bytes(rows: int, width: int, planes: int) -> int:
    """Peak memory of `refined_planes`, with the signs of a sweep: five times all signs, and a Hessian and its copy."""
    return 4 * (5 * planes * rows * width + 2 * width * width)


def _dense(signs: Tensor, index: Int[Tensor, " in"], scales: Tensor) -> Float[Tensor, "out in"]:
    return sum((own * scales[:, index, i] for i, own in enumerate(signs)), start=signs.new_zeros(signs.shape[1:]))


def _errors(weight: Tensor, hessian: Tensor, found: Tensor) -> Float[Tensor, " out"]:
    left = weight - found
    return (left @ hessian).mul_(left).sum(1)


def _rescaled(
    weight: Tensor, hessian: Tensor, signs: Tensor, index: Int[Tensor, " in"], scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """The scales of the least error where the error of the row falls; the signs of a negative one turn, in place."""
    found = _least_squares(weight, hessian, signs, index, scales)
    turns = torch.where(found < 0, -1.0, 1.0)
    rounded = positive(found.abs(), dtype)
    errors = [_errors(weight, hessian, _dense(signs, index, each)) for each in (rounded * turns, scales)]
    falls = (errors[0] < errors[1])[:, None, None]
    turns = torch.where(falls, turns, 1)
    for i, own in enumerate(signs):
        own *= turns[:, index, i]
    return torch.where(falls, rounded, scales)


def _least_squares(
    weight: Tensor, hessian: Tensor, signs: Tensor, index: Int[Tensor, " in"], scales: Tensor
) -> Float[Tensor, "out groups planes"]:
    """sum_m (B_k H B_m^T) a_m = B_k H w^T, with B_k the signs of a plane in one group, and zeros elsewhere.

    Planes of equal or opposite signs in a group, such as one of a single column, leave the difference of their scales
    open. It stays near that of `scales`: steps (M + r diag M)(a' - a) = b - M a end at a solution of M a = b. A row
    whose matrix has no Cholesky factor keeps its scales.
    """
    rows, groups, planes = scales.shape
    order, sizes = index.argsort(stable=True), index.bincount(minlength=groups).tolist()
    starts = list(accumulate(sizes, initial=0))  # columns of a group stand together, so their sums are those of slices
    hessian, found = hessian[order][:, order], scales.clone()
    for part in torch.arange(rows, device=weight.device).split(max(1, CHUNK // (groups * planes) ** 2)):
        own = signs[:, part][:, :, order]
        matrix = weight.new_zeros(len(part), groups, planes, groups, planes)
        for group, (start, stop) in enumerate(pairwise(starts)):
            for plane in range(planes):
                reach = own[plane, :, start:stop] @ hessian[start:stop, start:]
                sums = _sums(reach, own[:, :, start:], sizes[group:])
                matrix[:, group, plane, group:], matrix[:, group:, :, group, plane] = sums, sums
        wanted = _sums(weight[part][:, order] @ hessian, own, sizes)
        equations, solved = matrix.flatten(3).flatten(1, 2), found[part].flatten(1)[..., None]
        damped = equations.clone()
        diagonal = damped.diagonal(dim1=1, dim2=2)
        diagonal.copy_(torch.where(diagonal == 0, 1, (1 + RIDGE) * diagonal))
        lower, info = torch.linalg.cholesky_ex(damped)
        for _ in range(STEPS):
            left = wanted.flatten(1)[..., None] - equations @ solved
            solved = solved + torch.cholesky_solve(left, lower)
        found[part] = torch.where((info == 0)[:, None, None], solved.view(wanted.shape), found[part])
    return torch.where(found.isfinite(), found, scales)


def _sums(values: Tensor, signs: Tensor, sizes: Sequence[int]) -> Float[Tensor, "rows groups planes"]:
    """The sums of values * signs over the columns of each group; signs: [planes, rows, columns]."""
    by_group = [torch.stack([each.sum(1) for each in (values * own).split(sizes, dim=1)], dim=1) for own in signs]
    return torch.stack(by_group, dim=-1)


def _descended(
    weight: Tensor, hessian: Tensor, signs: Tensor, index: Int[Tensor, " in"], scales: Tensor, order: Int[Tensor, " in"]
) -> Float[Tensor, "planes out in"]:
    """New signs: those of the nearest sum to the best value of each column, given all others."""
    rows, groups, planes = scales.shape
    levels = [Levels(scales[:, group]) for group in range(groups)]
    group_of = index[order].tolist()
    found = torch.empty(len(order), rows, dtype=torch.uint8, device=weight.device)  # by place in the order

    def rule(place: int, wanted: Tensor) -> Tensor:
        chosen, value = levels[group_of[place]].nearest(wanted[:, None])
        found[place] = chosen[:, 0]
        return value[:, 0]

    descend(weight, _dense(signs, index, scales), hessian, order, rule)
    return signs_of(found[order.argsort()].T, planes).movedim(-1, 0).contiguous()
