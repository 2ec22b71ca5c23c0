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
from compress.native.columns import Integers, Rounded
from compress.numerics.column_sweep import PART
from compress.numerics.linalg import solve_positive
from compress.numerics.quant.codes import Codes, GroupSize, grouped, groups_in, spread, store

CHUNK = 1 << 22  # numbers of the normal equations of a chunk of rows: rows * groups^2, at least one row
GPU_CHUNK = 1 << 24  # the same on a GPU, where each chunk takes some launches per group


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
    """The codes, and the scales where these are free floats, after some rounds of refinement.

    The error of no row increases. hessian: damped, positive definite. dtype: of stored scales. mask: True where codes
    may differ from zero; `weight` counts everywhere. order: of the columns in coordinate descent; None: as they come.
    signed: scales may become negative.
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
    """The terms of a weight that is a sum of codes, each refined in turn for what the others leave; as `refined`.

    masks: where the codes of each term may differ from zero.
    """
    found, weight = list(terms), weight.float()
    masks = [None] * len(found) if masks is None else masks
    dense = [codes.dense() for codes in found]
    for _ in range(rounds):
        for i, mask in enumerate(masks):
            rest = weight - sum(other for j, other in enumerate(dense) if j != i)
            found[i] = refined(rest, found[i], hessian, 1, dtype, mask, order)
            dense[i] = found[i].dense()
    return found


def refits(codes: Codes) -> bool:
    """Whether scales are found by least squares: floats of their own for each row."""
    return codes.grid.free_scales and codes.group_size != "tensor" and codes.rows == 1


def refine_bytes(rows: int, width: int) -> int:
    """Peak memory of `refined`: the Hessian and a copy, and six matrices of the size of the weight."""
    return 4 * (2 * width * width + 6 * rows * width)


def _refitted(
    wanted: Float[Tensor, "out in"], codes: Codes, hessian: Float[Tensor, "in in"], dtype: torch.dtype, signed: bool
) -> Codes:
    """The codes with the scales of the least error, in their stored form; rows whose error would not fall stay.

    wanted: W H. With L_g the levels of group g and zeros elsewhere, sum_h (L_g H L_h^T) s_h = L_g H w^T for all g.
    """
    width, grid = wanted.shape[1], codes.grid
    zero = None if codes.zero is None else spread(codes.zero, width, codes.group_size, codes.group_index)
    levels = grid.decode(codes.codes, torch.ones_like(codes.scale[:1, :1]), zero).float()
    if codes.group_index is not None:  # the columns of a group side by side
        order = codes.group_index.argsort(stable=True).to(wanted.device)
        levels, wanted, hessian = levels[:, order], wanted[:, order], hessian[order][:, order]
    scale, span = codes.scale.clone(), grid.span
    chunk = GPU_CHUNK if levels.device.type == "cuda" else CHUNK
    for rows in torch.arange(len(levels), device=levels.device).split(max(1, chunk // scale.shape[1] ** 2)):
        before, matrix = scale[rows], _products(levels[rows], hessian, codes.group_size)
        aim = grouped(wanted[rows] * levels[rows], codes.group_size).sum(-1)
        found = _solved(matrix, aim, before)
        size = grid.scaling.round(found.abs() * span, span, dtype, codes.shared)
        fits = found.isfinite() & (found != 0) & (True if signed else found > 0)
        after = torch.where(fits, size * found.sign(), before)
        # the error of scales s is s M s^T - 2 s L H w^T + w H w^T
        rise = ((after - before) * ((matrix @ (after + before)[..., None])[..., 0] - 2 * aim)).sum(1)
        scale[rows] = torch.where((rise < 0)[:, None], after, before)
    return replace(codes, scale=scale)


def _products(
    levels: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"], group_size: GroupSize
) -> Float[Tensor, "out groups groups"]:
    """M[r, g, h] = L_g H L_h^T of each row."""
    count = groups_in(levels.shape[1], group_size)
    found = levels.new_empty(len(levels), count, count)
    for group in range(count):
        start = 0 if count == 1 else group * int(group_size)
        own = slice(start, None if count == 1 else start + int(group_size))
        reach = (levels[:, own] @ hessian[own, start:]).mul_(levels[:, start:])
        found[:, group, group:] = found[:, group:, group] = grouped(reach, group_size).sum(-1)
    return found


def _solved(matrix: Tensor, wanted: Tensor, start: Tensor) -> Tensor:
    """The solution of each row's equations; a group without levels and a row without a solution keep their scales."""
    empty = matrix.diagonal(dim1=1, dim2=2) == 0
    matrix = matrix + torch.diag_embed(empty.to(matrix.dtype))
    found, solved = solve_positive(matrix, torch.where(empty, start, wanted)[..., None])
    return torch.where(solved[:, None], found[..., 0], start)


def _descended(
    weight: Float[Tensor, "out in"],
    codes: Codes,
    hessian: Float[Tensor, "in in"],
    mask: Bool[Tensor, "out in"] | None,
    order: Int[Tensor, " in"] | None,
) -> Int[Tensor, "out in"]:
    """New codes, each the best one given all others when its column is reached."""
    width, grid = weight.shape[1], codes.grid
    order = torch.arange(width, device=weight.device) if order is None else order

    def by_column(per_group: Tensor) -> Tensor:
        every = spread(per_group, width, codes.group_size, codes.group_index).expand(len(weight), width)
        return every[:, order].T.contiguous()

    scale, zero = by_column(codes.scale), None if codes.zero is None else by_column(codes.zero)
    found = weight.new_empty(width, len(weight))
    keep = None if mask is None else mask[:, order].T

    def rounded(place: int, wanted: Tensor) -> Tensor:
        if keep is not None:
            wanted = wanted * keep[place]
        shift = None if zero is None else zero[place]
        found[place] = grid.encode(wanted, scale[place], shift)
        return grid.decode(found[place], scale[place], shift)

    def at_once(at: slice, slope: Tensor, old: Tensor, matrix: Tensor, pivots: Tensor) -> Rounded | None:
        if grid.integers is None or not native.usable(weight):
            return None
        integers = Integers(*grid.integers, scale[at], None if zero is None else zero[at])
        done = native.descend(slope, old, matrix, pivots, integers, None if keep is None else keep[at])
        found[at] = done.codes
        return done

    descend(weight, codes.dense(), hessian, order, rounded, at_once)
    return store(found.T[:, order.argsort()], grid)


def descend(
    weight: Float[Tensor, "out in"],
    start: Float[Tensor, "out in"],
    hessian: Float[Tensor, "in in"],
    order: Int[Tensor, " in"],
    rule: Callable[[int, Float[Tensor, " out"]], Float[Tensor, " out"]],
    at_once: Callable[[slice, Tensor, Tensor, Tensor, Tensor], Rounded | None] | None = None,
) -> Float[Tensor, "out in"]:
    """Coordinate descent on the error (w - q) H (w - q)^T of each row: every column once, in `order`.

    start: the first q. rule(place, wanted): the new values of the column at this place of the order, from those that
    would have the least error, given all other columns as they are. at_once(places, slope, old, matrix, pivots): the
    same for some columns, as `native.descend`; None: one after the other.
    """
    width = start.shape[1]
    # [in, out]: the gradient of half of the error by each value; a column is contiguous
    slope = ((weight - start) @ hessian)[:, order].T.contiguous()
    old = start[:, order].T.contiguous()
    new = torch.empty_like(old)
    hessian = hessian[order][:, order]
    pivots = hessian.diagonal()
    for begin in range(0, width, PART):
        stop = min(begin + PART, width)
        at = slice(begin, stop)
        done = at_once and at_once(at, slope[at], old[at], hessian[at, at], pivots[at])
        if done:
            new[at], steps = done.values, done.moves
        else:
            steps = torch.empty_like(slope[at])
            for i in range(begin, stop):
                # q_i + (w - q) H_i / H_ii: the value of the least error, given all others
                new[i] = rule(i, torch.addcdiv(old[i], slope[i], pivots[i]))
                torch.sub(new[i], old[i], out=steps[i - begin])
                if i + 1 < stop:
                    slope[i + 1 : stop].addr_(hessian[i, i + 1 : stop], steps[i - begin], alpha=-1)
        if stop < width:
            slope[stop:].addmm_(hessian[begin:stop, stop:].T, steps, alpha=-1)
    return new.T[:, order.argsort()]
