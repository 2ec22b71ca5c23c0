"""Refine a quantized weight after its sweep by coordinate descent, group by group: its scale, then its codes.

The error of a row is d H d^T with d = w - q(c, s). It is a quadratic form in each scale and in each code, given all
others. The sweep of GPTQ decides each column once, before the errors of later columns exist; coordinate descent decides
it again, given all others (QuantEase, Behdin 2023, arXiv 2309.01885, algorithm 1). A round takes one product of the
size of W H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.native import columns as native
from compress.numerics.column_sweep import PART
from compress.numerics.quant.codes import Codes, store

TURNS = 2  # over the groups of a part: the second takes no product with the whole Hessian (eval/LOG.md)


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
        order: order of the columns in coordinate descent; None: unchanged. Where scales are refined, groups come by the
            mean place of their columns.
        signed: whether scales may become negative.
    """
    weight = weight.float()
    for _ in range(rounds):
        descent = _Descent(weight, codes, hessian, dtype, mask, signed)
        codes = descent(torch.arange(weight.shape[1], device=weight.device) if order is None else order)
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
    """Whether scales are refined: floats that are not shared by several rows."""
    return codes.grid.free_scales and codes.group_size != "tensor" and codes.rows == 1


def refine_bytes(rows: int, width: int) -> int:
    """Return the peak memory of `refined` in bytes: the Hessian, and four matrices like the weight."""
    return 4 * (width * width + 4 * rows * width)


class _Descent:
    """One round of `refined`, whose arguments it takes."""

    def __init__(
        self,
        weight: Float[Tensor, "out in"],
        codes: Codes,
        hessian: Float[Tensor, "in in"],
        dtype: torch.dtype,
        mask: Bool[Tensor, "out in"] | None,
        signed: bool,
    ) -> None:
        self.start, self.grid, self.hessian, self.dtype, self.signed = codes, codes.grid, hessian, dtype, signed
        self.scale = codes.scale.clone()
        # [in, out]: a column is contiguous
        self.difference = (weight - codes.dense()).T.contiguous()
        self.codes = codes.codes.T.clone(memory_format=torch.contiguous_format)
        self.keep = None if mask is None else mask.T

    def __call__(self, order: Int[Tensor, " in"]) -> Codes:
        """Return the refined codes."""
        group_of = self._groups(len(order))
        if refits(self.start):
            for block in _blocks(_ordered_groups(group_of, order)):
                self._refine(block, [int(group_of[group[0]]) for group in block])
        else:
            for columns in order.split(PART):
                self._round(columns, group_of[columns])
        return replace(self.start, codes=self.codes.T.contiguous(), scale=self.scale)

    def _groups(self, width: int) -> Int[Tensor, " in"]:
        """Return the group of each column."""
        start = self.start
        if start.group_index is not None:
            return start.group_index.long()
        size = start.group_size if isinstance(start.group_size, int) else width
        return torch.arange(width, device=self.codes.device) // size

    def _refine(self, groups: Sequence[Int[Tensor, " columns"]], numbers: Sequence[int]) -> None:
        """Refine some groups, each in turn: a wide one, or all those of a part."""
        if len(groups[0]) > native.MAX_COLUMNS:
            self._fit_wide(groups[0], numbers[0])
            for columns in groups[0].split(PART):
                self._round(columns, columns.new_tensor(numbers))
            return
        columns = torch.cat(list(groups))
        rows = self.hessian[columns]
        slope, near = rows @ self.difference, rows[:, columns]
        ends = torch.tensor([len(group) for group in groups]).cumsum(0).tolist()
        for _ in range(TURNS):
            for group, number, end in zip(groups, numbers, ends, strict=True):
                inside = slice(end - len(group), end)
                levels = self._levels(group, number)
                image = near[:, inside] @ levels
                change = self._fit(number, (levels * slope[inside]).sum(0), (levels * image[inside]).sum(0))
                slope.addcmul_(image, change, value=-1)
                self.difference[group] -= levels * change
                moves = self._rounded(group, slope[inside], near[inside, inside], columns.new_tensor([number]))
                slope.addmm_(near[:, inside], moves, alpha=-1)

    def _levels(self, columns: Int[Tensor, " columns"], group: int) -> Float[Tensor, "columns out"]:
        """Return the values of the codes at scale 1."""
        zero = None if self.start.zero is None else self.start.zero[:, group]
        return self.grid.decode(self.codes[columns], torch.ones_like(self.scale[:1, 0]), zero).float()

    def _fit_wide(self, columns: Int[Tensor, " columns"], group: int) -> None:
        """Refine the scale of a group of many columns."""
        levels = self._levels(columns, group)
        slope, curvature = torch.zeros_like(levels[0]), torch.zeros_like(levels[0])
        for part, part_levels in zip(columns.split(PART), levels.split(PART), strict=True):
            rows = self.hessian[part]
            slope += ((rows @ self.difference) * part_levels).sum(0)
            curvature += ((rows[:, columns] @ levels) * part_levels).sum(0)
        self.difference[columns] -= levels * self._fit(group, slope, curvature)

    def _fit(self, group: int, slope: Float[Tensor, " out"], curvature: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        """Replace the scales of a group by those of the least error, in their stored form, and return their changes.

        Rows whose error would not decrease keep their scales, as do those without levels. With the levels l of the
        group, the error changes by d^2 l H l^T - 2 d l H (w - q)^T for a change d of the scale.

        Args:
            slope: l H (w - q)^T.
            curvature: l H l^T.
        """
        old, span = self.scale[:, group], self.grid.span
        solution = (old + slope / curvature)[:, None]
        rounded = self.grid.scaling.round(solution.abs() * span, span, self.dtype, self.start.shared)
        is_valid = solution.isfinite() & (solution != 0) & (True if self.signed else solution > 0)
        change = torch.where(is_valid, rounded * solution.sign(), old[:, None])[:, 0] - old
        change = torch.where(change * (change * curvature - 2 * slope) < 0, change, 0)
        self.scale[:, group] += change
        return change

    def _round(self, columns: Int[Tensor, " columns"], groups: Int[Tensor, " groups"]) -> None:
        """Decide the codes of a part of the columns again."""
        rows = self.hessian[columns]
        self._rounded(columns, rows @ self.difference, rows[:, columns], groups)

    def _rounded(
        self,
        columns: Int[Tensor, " columns"],
        slope: Float[Tensor, "columns out"],
        matrix: Float[Tensor, "columns columns"],
        groups: Int[Tensor, " groups"],
    ) -> Float[Tensor, "columns out"]:
        """Decide the codes of some columns again, in turn, and return the changes of their values.

        Args:
            slope: H (w - q)^T of these columns.
            matrix: H of these columns.
            groups: the group of each column, or one group.
        """
        grid, shape = self.grid, slope.shape
        scale = self.scale[:, groups].T.expand(shape)
        zero = None if self.start.zero is None else self.start.zero[:, groups].T.expand(shape)
        old, keep = (
            grid.decode(self.codes[columns], scale, zero).float(),
            None if self.keep is None else self.keep[columns],
        )
        scaled = grid.scaled(scale, zero)
        if scaled is not None and native.usable(slope, scaled):
            rounded = native.descend(slope, old, matrix, matrix.diagonal(), scaled, keep)
            codes, moves = rounded.codes, rounded.moves
        else:
            codes = torch.empty_like(slope)

            def rule(place: int, target: Tensor) -> Tensor:
                target, shift = target if keep is None else target * keep[place], None if zero is None else zero[place]
                codes[place] = grid.encode(target, scale[place], shift)
                return grid.decode(codes[place], scale[place], shift)

            moves = _descend_part(slope, old, matrix, rule)
        self.codes[columns] = store(codes, grid)
        self.difference[columns] -= moves
        return moves


def _ordered_groups(group_of: Int[Tensor, " in"], order: Int[Tensor, " in"]) -> list[Int[Tensor, " columns"]]:
    """Return the columns of each group in their order; a group comes by the mean place of its columns.

    So groups with large inputs are decided first, if the order begins with these (eval/LOG.md).
    """
    sizes = group_of.bincount()
    groups = order[group_of[order].argsort(stable=True)].split(sizes.tolist())
    places = order.new_zeros(len(sizes), dtype=torch.float64).index_add_(0, group_of, order.argsort().double())
    return [groups[number] for number in (places / sizes).argsort(stable=True).tolist()]


def _blocks(groups: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Combine consecutive groups up to the columns of a part."""
    block: list[Tensor] = []
    for group in groups:
        if block and sum(map(len, block)) + len(group) > PART:
            yield block
            block = []
        block.append(group)
    yield block


def _descend_part(
    slope: Float[Tensor, "columns out"],
    old: Float[Tensor, "columns out"],
    matrix: Float[Tensor, "columns columns"],
    rule: Callable[[int, Float[Tensor, " out"]], Float[Tensor, " out"]],
) -> Float[Tensor, "columns out"]:
    """Return the changes of some columns that are decided in turn."""
    slope, moves, pivots = slope.clone(), torch.empty_like(slope), matrix.diagonal()
    for i, column in enumerate(old):
        # q_i + (w - q) H_i / H_ii: the value of the least error, given all others
        torch.sub(rule(i, torch.addcdiv(column, slope[i], pivots[i])), column, out=moves[i])
        slope[i + 1 :].addr_(matrix[i, i + 1 :], moves[i], alpha=-1)
    return moves


def descend(
    weight: Float[Tensor, "out in"],
    start: Float[Tensor, "out in"],
    hessian: Float[Tensor, "in in"],
    order: Int[Tensor, " in"],
    rule: Callable[[int, Float[Tensor, " out"]], Float[Tensor, " out"]],
) -> Float[Tensor, "out in"]:
    """Minimize the error (w - q) H (w - q)^T of each row by coordinate descent: every column once, in `order`.

    Args:
        weight: w.
        start: initial q.
        hessian: H, damped.
        order: the column of each step.
        rule: rule(step, target) returns the new values of the column of this step. The target has the least error given
            all other columns.

    Returns:
        The new q.
    """
    new = start.T.clone(memory_format=torch.contiguous_format)  # [in, out]: a column is contiguous
    difference = weight.T - new
    for first, columns in enumerate(order.split(PART)):
        rows, old = hessian[columns], new[columns]
        moves = _descend_part(rows @ difference, old, rows[:, columns], lambda i, t, at=first * PART: rule(at + i, t))
        new[columns] = old + moves
        difference[columns] -= moves
    return new.T
