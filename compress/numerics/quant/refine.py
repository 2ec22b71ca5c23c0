"""Refine a quantized weight after its sweep: scales by least squares given the codes, then coordinate descent on codes.

The error of a row is d H d^T with d = w - q(c, s). For fixed codes it is a quadratic form in the scales of the row, and
for fixed scales in each code. The sweep of GPTQ decides each column once, before the errors of later columns exist;
coordinate descent decides it again, given all others (QuantEase, Behdin 2023, arXiv 2309.01885, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.native import columns as native
from compress.native.columns import RoundedColumns
from compress.numerics.column_sweep import PART
from compress.numerics.linalg import solve_positive
from compress.numerics.quant.codes import Codes, GroupSize, grouped, groups_in, spread, store

CHUNK = 1 << 22  # numbers of the normal equations of a chunk of rows: rows * groups^2, at least one row
GPU_CHUNK = 1 << 24  # the same on a GPU, where each chunk takes several launches per group


def refined(
    weight: Float[Tensor, "out in"],
    codes: Codes,
    hessian: Float[Tensor, "in in"],
    rounds: int,
    dtype: torch.dtype,
    mask: Bool[Tensor, "out in"] | None = None,
    order: Int[Tensor, " in"] | None = None,
    signed: bool = False,
) -> Codes:
    """Refine the codes, and the scales where these are free floats. The error of no row increases.

    Args:
        weight: the weight; it counts everywhere, also where `mask` is False.
        codes: initial codes.
        hessian: damped, positive definite.
        rounds: rounds of refinement.
        dtype: dtype of stored scales.
        mask: True where codes may differ from zero.
        order: order of the columns in coordinate descent; None: unchanged.
        signed: whether scales may become negative.
    """
    weight = weight.float()
    for _ in range(rounds):
        if refits(codes):
            codes = _refitted(weight @ hessian, codes, hessian, dtype, signed)
        codes = replace(codes, codes=_descended(weight, codes, hessian, mask, order))
    return codes


def refined_sum(
    weight: Float[Tensor, "out in"],
    terms: Sequence[Codes],
    hessian: Float[Tensor, "in in"],
    rounds: int,
    dtype: torch.dtype,
    masks: Sequence[Bool[Tensor, "out in"] | None] | None = None,
    order: Int[Tensor, " in"] | None = None,
) -> list[Codes]:
    """Refine the terms of a weight that is a sum of codes, each in turn for the residual of the others.

    Args:
        weight: see `refined`.
        terms: initial codes of each term.
        hessian: see `refined`.
        rounds: see `refined`.
        dtype: see `refined`.
        masks: where the codes of each term may differ from zero.
        order: see `refined`.
    """
    refined_terms, weight = list(terms), weight.float()
    masks = [None] * len(refined_terms) if masks is None else masks
    dense = [codes.dense() for codes in refined_terms]
    for _ in range(rounds):
        for i, mask in enumerate(masks):
            residual = weight - sum(values for j, values in enumerate(dense) if j != i)
            refined_terms[i] = refined(residual, refined_terms[i], hessian, 1, dtype, mask, order)
            dense[i] = refined_terms[i].dense()
    return refined_terms


def refits(codes: Codes) -> bool:
    """Whether scales are found by least squares: floats that are not shared by several rows."""
    return codes.grid.free_scales and codes.group_size != "tensor" and codes.rows == 1


def refine_bytes(rows: int, width: int) -> int:
    """Return the peak memory of `refined` in bytes: the Hessian and a copy, and six matrices like the weight."""
    return 4 * (2 * width * width + 6 * rows * width)


def _refitted(
    target: Float[Tensor, "out in"], codes: Codes, hessian: Float[Tensor, "in in"], dtype: torch.dtype, signed: bool
) -> Codes:
    """Replace the scales by those of the least error, in their stored form.

    Rows whose error would not decrease keep their scales. With L_g the levels of group g and zeros elsewhere,
    sum_h (L_g H L_h^T) s_h = L_g H w^T for all g.

    Args:
        target: W H.
    """
    width, grid = target.shape[1], codes.grid
    zero = None if codes.zero is None else spread(codes.zero, width, codes.group_size, codes.group_index)
    levels = grid.decode(codes.codes, torch.ones_like(codes.scale[:1, :1]), zero).float()
    if codes.group_index is not None:  # the columns of a group side by side
        order = codes.group_index.argsort(stable=True).to(target.device)
        levels, target, hessian = levels[:, order], target[:, order], hessian[order][:, order]
    scale, span = codes.scale.clone(), grid.span
    chunk = GPU_CHUNK if levels.device.type == "cuda" else CHUNK
    for rows in torch.arange(len(levels), device=levels.device).split(max(1, chunk // scale.shape[1] ** 2)):
        old_scale, matrix = scale[rows], _products(levels[rows], hessian, codes.group_size)
        right_side = grouped(target[rows] * levels[rows], codes.group_size).sum(-1)
        solution = _solved(matrix, right_side, old_scale)
        rounded = grid.scaling.round(solution.abs() * span, span, dtype, codes.shared)
        is_valid = solution.isfinite() & (solution != 0) & (True if signed else solution > 0)
        new_scale = torch.where(is_valid, rounded * solution.sign(), old_scale)
        # the error of scales s is s M s^T - 2 s L H w^T + w H w^T
        error_change = (
            (new_scale - old_scale) * ((matrix @ (new_scale + old_scale)[..., None])[..., 0] - 2 * right_side)
        ).sum(1)
        scale[rows] = torch.where((error_change < 0)[:, None], new_scale, old_scale)
    return replace(codes, scale=scale)


def _products(
    levels: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"], group_size: GroupSize
) -> Float[Tensor, "out groups groups"]:
    """Compute M[r, g, h] = L_g H L_h^T for each row r."""
    count = groups_in(levels.shape[1], group_size)
    products = levels.new_empty(len(levels), count, count)
    for group in range(count):
        start = 0 if count == 1 else group * int(group_size)
        columns = slice(start, None if count == 1 else start + int(group_size))
        weighted = (levels[:, columns] @ hessian[columns, start:]).mul_(levels[:, start:])
        products[:, group, group:] = products[:, group:, group] = grouped(weighted, group_size).sum(-1)
    return products


def _solved(matrix: Tensor, right_side: Tensor, start: Tensor) -> Tensor:
    """Solve the equations of each row; a group without levels and a row without a solution keep their scales."""
    is_empty = matrix.diagonal(dim1=1, dim2=2) == 0
    matrix = matrix + torch.diag_embed(is_empty.to(matrix.dtype))
    solution, is_solved = solve_positive(matrix, torch.where(is_empty, start, right_side)[..., None])
    return torch.where(is_solved[:, None], solution[..., 0], start)


def _descended(
    weight: Float[Tensor, "out in"],
    codes: Codes,
    hessian: Float[Tensor, "in in"],
    mask: Bool[Tensor, "out in"] | None,
    order: Int[Tensor, " in"] | None,
) -> Int[Tensor, "out in"]:
    """Return new codes, each the best one for the current values of all others when its column is reached."""
    width, grid = weight.shape[1], codes.grid
    order = torch.arange(width, device=weight.device) if order is None else order

    def by_column(per_group: Tensor) -> Tensor:
        expanded = spread(per_group, width, codes.group_size, codes.group_index).expand(len(weight), width)
        return expanded[:, order].T.contiguous()

    scale, zero = by_column(codes.scale), None if codes.zero is None else by_column(codes.zero)
    new_codes = weight.new_empty(width, len(weight))
    keep = None if mask is None else mask[:, order].T

    def rounded(place: int, target: Tensor) -> Tensor:
        if keep is not None:
            target = target * keep[place]
        shift = None if zero is None else zero[place]
        new_codes[place] = grid.encode(target, scale[place], shift)
        return grid.decode(new_codes[place], scale[place], shift)

    def round_together(
        columns: slice, slope: Tensor, old: Tensor, matrix: Tensor, pivots: Tensor
    ) -> RoundedColumns | None:
        scaled = grid.scaled(scale[columns], None if zero is None else zero[columns])
        if scaled is None or not native.usable(weight, scaled):
            return None
        rounded_columns = native.descend(slope, old, matrix, pivots, scaled, None if keep is None else keep[columns])
        new_codes[columns] = rounded_columns.codes
        return rounded_columns

    descend(weight, codes.dense(), hessian, order, rounded, round_together)
    return store(new_codes.T[:, order.argsort()], grid)


def descend(
    weight: Float[Tensor, "out in"],
    start: Float[Tensor, "out in"],
    hessian: Float[Tensor, "in in"],
    order: Int[Tensor, " in"],
    rule: Callable[[int, Float[Tensor, " out"]], Float[Tensor, " out"]],
    rule_of_part: Callable[[slice, Tensor, Tensor, Tensor, Tensor], RoundedColumns | None] | None = None,
) -> Float[Tensor, "out in"]:
    """Minimize the error (w - q) H (w - q)^T of each row by coordinate descent: every column once, in `order`.

    Args:
        weight: w.
        start: initial q.
        hessian: H, damped.
        order: the column of each step.
        rule: rule(step, target) returns the new values of the column of this step. The target has the least error given
            all other columns.
        rule_of_part: rule_of_part(steps, slope, old, matrix, pivots) does the same for consecutive steps, as
            `native.columns.descend`; it returns None if they must be taken one by one.

    Returns:
        The new q.
    """
    width = start.shape[1]
    # [in, out]: the gradient of half of the error by each value; a column is contiguous
    slope = ((weight - start) @ hessian)[:, order].T.contiguous()
    old = start[:, order].T.contiguous()
    new = torch.empty_like(old)
    hessian = hessian[order][:, order]
    pivots = hessian.diagonal()
    for start_column in range(0, width, PART):
        stop_column = min(start_column + PART, width)
        columns = slice(start_column, stop_column)
        rounded = rule_of_part and rule_of_part(
            columns, slope[columns], old[columns], hessian[columns, columns], pivots[columns]
        )
        if rounded:
            new[columns], steps = rounded.values, rounded.moves
        else:
            steps = torch.empty_like(slope[columns])
            for i in range(start_column, stop_column):
                # q_i + (w - q) H_i / H_ii: the value of the least error, given all others
                new[i] = rule(i, torch.addcdiv(old[i], slope[i], pivots[i]))
                torch.sub(new[i], old[i], out=steps[i - start_column])
                if i + 1 < stop_column:
                    slope[i + 1 : stop_column].addr_(hessian[i, i + 1 : stop_column], steps[i - start_column], alpha=-1)
        if stop_column < width:
            slope[stop_column:].addmm_(hessian[start_column:stop_column, stop_column:].T, steps, alpha=-1)
    return new.T[:, order.argsort()]
