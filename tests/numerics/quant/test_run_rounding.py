"""Rounding of runs in a sweep: against a sweep written out by the textbook, and refinement that never loses."""

import pytest
import torch

from compress.numerics.linalg import inverse_factor
from compress.numerics.quant.codebooks import RunSearch
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.rounding import GridOptions
from compress.numerics.quant.run_rounding import refined_runs, round_runs, run_order

pytest.importorskip("gguf.quants")

WIDTH, DAMPING = 256, 0.01


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(rows=6, seed=0):
    mixed = random(512, WIDTH, seed=seed) @ (torch.eye(WIDTH) + 0.2 * random(WIDTH, WIDTH, seed=seed + 1))
    hessian = mixed.T @ mixed / 512
    return random(rows, WIDTH, seed=seed + 2), hessian + DAMPING * hessian.diagonal().mean() * torch.eye(WIDTH)


def options(name):
    grid = GRIDS[name]
    return GridOptions(grid, grid.group_size, True, "mse", torch.float16)


def loss(codes, weight, hessian):
    difference = codes.dense() - weight
    return ((difference @ hessian) * difference).sum(1)


def test_the_order_keeps_runs_together():
    """Runs of two with the sums 3, 9 and 4 come as 9, 4, 3."""
    assert run_order(torch.tensor([1.0, 2.0, 4.0, 5.0, 4.0, 0.0]), 2).tolist() == [2, 3, 4, 5, 0, 1]
    assert run_order(torch.tensor([1.0, 3.0, 2.0]), 1).tolist() == [1, 2, 0]


@pytest.mark.parametrize("name", ["iq3_s", "iq2_xs"])
def test_the_sweep_is_the_textbook_one(name):
    """OBS for blocks: M is the inverse of the block of inv(H) of the open columns; they move by its compensation."""
    weight, hessian = problem()
    codes = round_runs(weight, inverse_factor(hessian, 1e-9)[0], options(name))
    grid, work = GRIDS[name], weight.double()
    expected = torch.empty_like(codes.codes)
    for start in range(0, WIDTH, grid.run):
        inverse = torch.linalg.inv(hessian[start:, start:].double())
        matrix = torch.linalg.inv(inverse[: grid.run, : grid.run])
        columns, step = slice(start, start + grid.run), codes.scale[:, start // codes.group_size, None]
        runs = RunSearch(grid.codebook, matrix.float()).nearest(work[:, columns].float() / step)
        expected[:, columns] = runs.codes.to(torch.uint8)
        error = work[:, columns] - (runs.values * step).double()
        work[:, start:] -= error @ matrix @ inverse[: grid.run]
    same = (expected == codes.codes).view(len(weight), -1, grid.run).all(-1)
    assert float(same.float().mean()) > 0.9  # sums in another order can change a near tie, and what follows in its row
    assert float(loss(codes, weight, hessian).sum()) < 0.9 * float(weight.square().sum())


@pytest.mark.parametrize("grid", [grid for grid in GRIDS.values() if grid.run > 1], ids=lambda grid: grid.name)
def test_refinement_increases_the_error_of_no_row_and_keeps_the_stored_form(grid):
    weight, hessian = problem(seed=7)
    order = run_order(hessian.diagonal(), grid.run)
    codes = round_runs(weight, inverse_factor(hessian[order][:, order], 1e-9)[0], options(grid.name), order)
    before = loss(codes, weight, hessian)
    for _ in range(2):
        codes = refined_runs(weight, codes, hessian, 1, order)
        after = loss(codes, weight, hessian)
        assert (after <= before * (1 + 1e-5)).all() and float(after.sum()) < float(before.sum())
        before = after
    integers = grid.scaling.encode(codes.scale, codes.shared)
    assert torch.equal(grid.scaling.decode(integers, codes.shared), codes.scale)
    assert bool((integers % 2 == 1).all()) and torch.equal(codes.shared.half().float(), codes.shared)


def test_an_exact_weight_stays_exact():
    """A weight of the grid is found again by the sweep, and refinement leaves it alone."""
    weight, hessian = problem(seed=9)
    start = round_runs(weight, inverse_factor(hessian, 1e-9)[0], options("iq3_s"))
    exact = start.dense()
    again = refined_runs(exact, start, hessian, 1)
    assert torch.equal(again.codes, start.codes) and torch.equal(again.dense(), exact)
