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
    """Refine planes of a weight. The error of no row increases.

    Args:
        weight: the weight.
        planes: binary codes with scales for the same groups.
        hessian: damped, positive definite.
        rounds: rounds of refinement.
        dtype: dtype of stored scales.
        order: order of the columns in coordinate descent; None: unchanged.
    """
    weight, first_plane = weight.float(), planes[0]
    width, groups = weight.shape[1], first_plane.scale.shape[1]
    order = torch.arange(width, device=weight.device) if order is None else order
    index = first_plane.group_index
    if index is None:
        index = spread(torch.arange(groups)[None], width, first_plane.group_size).expand(1, width)[0]
    index = index.long().to(weight.device)
    signs = torch.stack([plane.codes.float() * 2 - 1 for plane in planes])  # [planes, out, in]
    scales = torch.stack([plane.scale.float() for plane in planes], dim=-1)  # [out, groups, planes]
    for _ in range(rounds):
        scales = _rescaled(weight, hessian, signs, index, scales, dtype)
        signs = _descended(weight, hessian, signs, index, scales, order)
    return [
        replace(plane, codes=store(plane_signs > 0, plane.grid), scale=scales[..., i].contiguous())
        for i, (plane, plane_signs) in enumerate(zip(planes, signs, strict=True))
    ]


def planes_bytes(rows: int, width: int, planes: int) -> int:
    """Return the peak memory of `refined_planes` in bytes: five times all signs, and a Hessian and its copy."""
    return 4 * (5 * planes * rows * width + 2 * width * width)


def _dense(signs: Tensor, index: Int[Tensor, " in"], scales: Tensor) -> Float[Tensor, "out in"]:
    return sum(
        (plane_signs * scales[:, index, i] for i, plane_signs in enumerate(signs)),
        start=signs.new_zeros(signs.shape[1:]),
    )


def _errors(weight: Tensor, hessian: Tensor, approximation: Tensor) -> Float[Tensor, " out"]:
    residual = weight - approximation
    return (residual @ hessian).mul_(residual).sum(1)


def _rescaled(
    weight: Tensor, hessian: Tensor, signs: Tensor, index: Int[Tensor, " in"], scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the scales of the least error for rows whose error decreases; negative scales flip signs in place."""
    solution = _least_squares(weight, hessian, signs, index, scales)
    flips = torch.where(solution < 0, -1.0, 1.0)
    rounded = positive(solution.abs(), dtype)
    errors = [_errors(weight, hessian, _dense(signs, index, candidate)) for candidate in (rounded * flips, scales)]
    is_better = (errors[0] < errors[1])[:, None, None]
    flips = torch.where(is_better, flips, 1)
    for i, plane_signs in enumerate(signs):
        plane_signs *= flips[:, index, i]
    return torch.where(is_better, rounded, scales)


def _least_squares(
    weight: Tensor, hessian: Tensor, signs: Tensor, index: Int[Tensor, " in"], scales: Tensor
) -> Float[Tensor, "out groups planes"]:
    """Solve sum_m (B_k H B_m^T) a_m = B_k H w^T, with B_k the signs of a plane in one group, and zeros elsewhere.

    Planes of equal or opposite signs in a group, such as one of a single column, leave the difference of their scales
    open. It stays near that of `scales`: steps (M + r diag M)(a' - a) = b - M a end at a solution of M a = b. A row
    whose matrix has no Cholesky factor keeps its scales.
    """
    rows, groups, planes = scales.shape
    order, sizes = index.argsort(stable=True), index.bincount(minlength=groups).tolist()
    starts = list(accumulate(sizes, initial=0))  # columns of a group stand together, so their sums are those of slices
    hessian, solutions = hessian[order][:, order], scales.clone()
    for part in torch.arange(rows, device=weight.device).split(max(1, CHUNK // (groups * planes) ** 2)):
        part_signs = signs[:, part][:, :, order]
        matrix = weight.new_zeros(len(part), groups, planes, groups, planes)
        for group, (start, stop) in enumerate(pairwise(starts)):
            for plane in range(planes):
                weighted = part_signs[plane, :, start:stop] @ hessian[start:stop, start:]
                sums = _sums(weighted, part_signs[:, :, start:], sizes[group:])
                matrix[:, group, plane, group:], matrix[:, group:, :, group, plane] = sums, sums
        right_side = _sums(weight[part][:, order] @ hessian, part_signs, sizes)
        equations, solved = matrix.flatten(3).flatten(1, 2), solutions[part].flatten(1)[..., None]
        damped = equations.clone()
        diagonal = damped.diagonal(dim1=1, dim2=2)
        diagonal.copy_(torch.where(diagonal == 0, 1, (1 + RIDGE) * diagonal))
        lower, info = torch.linalg.cholesky_ex(damped)
        for _ in range(STEPS):
            residual = right_side.flatten(1)[..., None] - equations @ solved
            solved = solved + torch.cholesky_solve(residual, lower)
        solutions[part] = torch.where((info == 0)[:, None, None], solved.view(right_side.shape), solutions[part])
    return torch.where(solutions.isfinite(), solutions, scales)


def _sums(values: Tensor, signs: Tensor, sizes: Sequence[int]) -> Float[Tensor, "rows groups planes"]:
    """Sum values * signs over the columns of each group, with signs of shape [planes, rows, columns]."""
    by_group = [
        torch.stack([group.sum(1) for group in (values * plane_signs).split(sizes, dim=1)], dim=1)
        for plane_signs in signs
    ]
    return torch.stack(by_group, dim=-1)


def _descended(
    weight: Tensor, hessian: Tensor, signs: Tensor, index: Int[Tensor, " in"], scales: Tensor, order: Int[Tensor, " in"]
) -> Float[Tensor, "planes out in"]:
    """Return new signs: those of the sum nearest to the best value of each column, given all others."""
    rows, groups, planes = scales.shape
    levels = [Levels(scales[:, group]) for group in range(groups)]
    group_of = index[order].tolist()
    indices = torch.empty(len(order), rows, dtype=torch.uint8, device=weight.device)  # by place in the order

    def rule(step: int, target: Tensor) -> Tensor:
        index_of_level, value = levels[group_of[step]].nearest(target[:, None])
        indices[step] = index_of_level[:, 0]
        return value[:, 0]

    descend(weight, _dense(signs, index, scales), hessian, order, rule)
    return signs_of(indices[order.argsort()].T, planes).movedim(-1, 0).contiguous()
