"""Rounding in runs: the sweep of GPTQ and its refinement for grids whose codes are chosen for several columns at once.

The sweep is that of `column_sweep` with units of `Grid.run` columns: an error e of a unit costs e M e^T after its best
compensation in later columns, with inv(M) the block of inv(H) for this unit, H that of the columns that remain (GPTQ,
Frantar 2022, section 3.2; QuIP#, Tseng 2024, section 4.2). `RunSearch` chooses the codes of a unit by this cost, in
which correlations inside of the unit count.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.column_sweep import PART
from compress.numerics.linalg import factor_bytes, solve_general
from compress.numerics.quant.codebooks import RunSearch
from compress.numerics.quant.codes import Codes, fit, fit_shared, grouped, spread, store
from compress.numerics.quant.grids import RunGrid
from compress.numerics.quant.rounding import GridOptions
from compress.numerics.quant.scales import positive


def run_order(diagonal: Float[Tensor, " in"], length: int) -> Int[Tensor, " in"]:
    """Return the order of columns with large inputs first, in which runs of `length` columns stay together."""
    runs = diagonal.view(-1, length).sum(1).argsort(descending=True, stable=True)
    return (runs[:, None] * length + torch.arange(length, device=runs.device)).flatten()


def rounding_bytes_of_runs(rows: int, width: int) -> int:
    """Return the peak memory of factoring a Hessian, then of `round_runs` and `refined_runs`, in bytes.

    The Hessian and its factor; the weight, its working copy, and the codes with their levels.
    """
    return max(factor_bytes(width), 2 * 4 * width * width + 6 * 4 * rows * width)


def round_runs(
    weight: Float[Tensor, "out in"],
    factor: Float[Tensor, "in in"],
    options: GridOptions,
    order: Int[Tensor, " in"] | None = None,
) -> Codes:
    """Round unit by unit and compensate each error in the later columns. Scales are fitted before.

    Args:
        weight: the weight to round.
        factor: U of `linalg.inverse_factor`, in the order of the sweep.
        options: a `RunGrid` and its scales.
        order: column of each step of the sweep, from `run_order`; None: unchanged.
    """
    grid, size, importance = options.grid, options.group_size, options.importance
    assert isinstance(grid, RunGrid) and isinstance(size, int)
    shared = fit_shared(weight, grid, size, options.shared_absmax, options.search, importance)
    scale, _ = fit(
        weight, grid, size, True, options.search, options.dtype, shared, importance=importance, signed=options.signed
    )
    order = torch.arange(weight.shape[1], device=weight.device) if order is None else order
    unit, width = grid.run, len(order)
    work, groups = weight.float()[:, order], order[::unit] // size
    rounded = torch.empty_like(work, dtype=torch.uint8)
    identity = torch.eye(unit, dtype=factor.dtype, device=factor.device)
    for start in range(0, width, PART):
        stop = min(start + PART, width)
        errors = []
        for column in range(start, stop, unit):
            columns = slice(column, column + unit)
            inverse = torch.linalg.solve_triangular(factor[columns, columns], identity, upper=True)
            step = scale[:, groups[column // unit], None]
            runs = RunSearch(grid.codebook, inverse @ inverse.T).nearest(work[:, columns] / step)
            rounded[:, columns] = runs.codes.to(torch.uint8)
            error = (work[:, columns] - runs.values * step) @ inverse
            errors.append(error)
            work[:, column + unit : stop].addmm_(error, factor[columns, column + unit : stop], alpha=-1)
        work[:, stop:].addmm_(torch.cat(errors, 1), factor[start:stop, stop:], alpha=-1)
    codes = torch.empty_like(rounded).index_copy_(1, order, rounded)
    return Codes(store(codes, grid), scale, None, grid, size, shared=shared)


def refined_runs(
    weight: Float[Tensor, "out in"],
    codes: Codes,
    hessian: Float[Tensor, "in in"],
    rounds: int,
    order: Int[Tensor, " in"] | None = None,
) -> Codes:
    """Refine the codes of runs, their scales, and the steps of super-blocks. The error of no row increases.

    Args:
        weight: the weight.
        codes: codes of a `RunGrid`.
        hessian: damped, positive definite.
        rounds: rounds of refinement.
        order: order of the columns of the sweep, whose runs stay together; None: unchanged.
    """
    descent = _RunDescent(weight.float(), codes, hessian)
    order = torch.arange(weight.shape[1], device=weight.device) if order is None else order
    for _ in range(rounds):
        descent.descend(order)
        descent.fit_steps()
    return descent.codes()


class _RunDescent:
    """The state of `refined_runs`, whose arguments it takes."""

    def __init__(self, weight: Float[Tensor, "out in"], codes: Codes, hessian: Float[Tensor, "in in"]) -> None:
        assert isinstance(codes.grid, RunGrid) and isinstance(codes.group_size, int) and codes.shared is not None
        self.start, self.grid, self.hessian, self.size = codes, codes.grid, hessian, codes.group_size
        self.rounded, self.scale, self.shared = codes.codes.clone(), codes.scale.clone(), codes.shared.clone()
        self.levels = torch.tensor(self.grid.levels, device=weight.device)
        self.difference = weight - codes.dense()

    def codes(self) -> Codes:
        """Return the refined codes."""
        return replace(self.start, codes=self.rounded, scale=self.scale, shared=self.shared)

    def descend(self, order: Int[Tensor, " in"]) -> None:
        """Decide the scale of each group again, then its units, each given all others."""
        unit, per_group = self.grid.run, self.size // self.grid.run
        # a group comes by the mean place of its columns
        places = grouped(order.argsort()[None].float(), self.size)[0].mean(-1).argsort(stable=True)
        for part in places.split(max(1, PART // self.size)):
            columns = (part[:, None] * self.size + torch.arange(self.size, device=part.device)).flatten()
            rows = self.hessian[columns]
            slope, near = self.difference @ rows.T, rows[:, columns]
            for place, group in enumerate(part.tolist()):
                inside = slice(place * self.size, (place + 1) * self.size)
                self._fit_scale(group, inside, slope, near)
                for run in range(per_group):
                    within = slice(inside.start + run * unit, inside.start + (run + 1) * unit)
                    self._choose(columns[within], self.scale[:, group, None], within, slope, near)

    def _fit_scale(self, group: int, inside: slice, slope: Tensor, near: Tensor) -> None:
        """Replace the scales of a group by the stored ones of the least error, where it decreases."""
        columns = slice(group * self.size, (group + 1) * self.size)
        levels = self.levels[self.rounded[:, columns].long()]
        curvature, gain = ((levels @ near[inside, inside]) * levels).sum(1), (levels * slope[:, inside]).sum(1)
        old = self.scale[:, group]
        extent = (old + gain / curvature).nan_to_num(0.0, 0.0, 0.0)[:, None].clamp(min=0) * self.grid.span
        rows, groups = self.scale.shape
        shared = self.grid.scaling.part(self.shared, rows, groups, group)
        change = self.grid.scaling.round(extent, self.grid.span, torch.float32, shared)[:, 0] - old
        # the error changes by d^2 l H l^T - 2 d l H (w - q)^T
        change = torch.where(change * (change * curvature - 2 * gain) < 0, change, 0)
        self.scale[:, group] += change
        move = levels * change[:, None]
        self.difference[:, columns] -= move
        slope.addmm_(move, near[inside], alpha=-1)

    def _choose(self, columns: Tensor, step: Tensor, within: slice, slope: Tensor, near: Tensor) -> None:
        """Choose the codes of a unit again, where the error decreases."""
        matrix = near[within, within]
        old = self.levels[self.rounded[:, columns].long()] * step
        target = old + solve_general(matrix, slope[:, within].T).T
        runs = RunSearch(self.grid.codebook, matrix).nearest(target / step)
        move = runs.values * step - old
        # the error changes by d H d^T - 2 d H (w - q)^T
        is_better = ((move @ matrix - 2 * slope[:, within]) * move).sum(1, keepdim=True) < 0
        move = torch.where(is_better, move, 0)
        self.rounded[:, columns] = torch.where(is_better, runs.codes.to(torch.uint8), self.rounded[:, columns])
        self.difference[:, columns] -= move
        slope.addmm_(move, near[within], alpha=-1)

    def fit_steps(self) -> None:
        """Replace the steps of super-blocks by the float16 numbers of the least error, where it decreases."""
        scaling = self.grid.scaling
        steps, width = self.shared.view(len(self.rounded), -1), self.grid.block
        integers = scaling.encode(self.scale, self.shared).float()
        for block in range(steps.shape[1]):
            columns = slice(block * width, (block + 1) * width)
            groups = slice(block * scaling.super_block, (block + 1) * scaling.super_block)
            values = self.levels[self.rounded[:, columns].long()] * spread(integers[:, groups], width, self.size)
            gain = ((self.difference @ self.hessian[:, columns]) * values).sum(1)
            curvature = ((values @ self.hessian[columns, columns]) * values).sum(1)
            solution = (steps[:, block] + gain / curvature).nan_to_num(0.0, 0.0, 0.0)
            change = positive(solution.clamp(min=0), torch.float16) - steps[:, block]
            change = torch.where(change * (change * curvature - 2 * gain) < 0, change, 0)
            self.difference[:, columns] -= values * change[:, None]
            steps[:, block] += change
        self.scale = scaling.decode(integers, self.shared)
