"""Problems for loops over columns, their results in plain torch, and checks that hold for C++ and for Triton's programs."""

from dataclasses import replace

import torch
from draws import random

from compress.native import columns as native
from compress.native.columns import ScaledGrid
from compress.numerics.linalg import inverse_factor
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.refine import refined
from compress.numerics.quant.rounding import GridOptions, round_columns
from compress.numerics.quant.weighted_search import WeightedSearch

GROUPS = [(16, True, False), (24, True, True), (16, False, False), ("channel", True, False)]
"""Group size, whether columns have an order, and whether groups are formed in it."""


def hessian_of(width, seed=0):
    rows = random(2 * width + 8, width, seed=seed)
    return rows.T @ rows / len(rows) + 0.05 * torch.eye(width)


def problem(rows, columns, shared, zeros, masked, seed, bits=4, device="cpu"):
    """The arguments of a sweep; scales of both signs."""

    def here(*shape, more):
        return random(*shape, seed=seed + more).to(device)

    shape = (rows,) if shared else (columns, rows)
    scale = (0.1 + here(*shape, more=0).abs()) * here(*shape, more=1).sign()
    zero = here(*shape, more=2).mul(2).round() if zeros else None
    grid = ScaledGrid((-(2 ** (bits - 1)), 2 ** (bits - 1) - 1), scale, zero)
    keep = here(columns, rows, more=3) > -0.5 if masked else None
    return here(columns, rows, more=4), 0.5 * here(columns, columns, more=5) / columns**0.5, grid, keep


def expected(state, matrix, grid, keep, old=None, pivots=None):
    """(codes, values, moves, wanted) column by column in plain torch."""
    state, actual = state.clone(), []
    for i in range(len(state)):
        scale, zero = grid.scale, 0 if grid.zero is None else grid.zero
        if scale.dim() == 2:
            scale, zero = scale[i], zero if grid.zero is None else zero[i]
        expected = state[i] if old is None else old[i] + state[i] / pivots[i]
        expected = expected if keep is None else expected * keep[i]
        codes = (expected / scale + zero).round().clamp(*grid.limits)
        value = (codes - zero) * scale
        move = state[i] - value if old is None else value - old[i]
        state[i + 1 :] -= matrix[i, i + 1 :, None] * move
        actual.append((codes, value, move, expected))
    return [torch.stack(item) for item in zip(*actual, strict=True)]


def same(actual, expected):
    """All rows but those in which the last bit of a sum decided a code."""
    agree = (actual.codes == expected[0]).all(0)
    assert agree.float().mean() > 0.9 or agree.numel() - int(agree.sum()) <= 1
    for mine, alternative in zip((actual.values, actual.moves, actual.targets), expected[1:], strict=True):
        assert mine is None or torch.allclose(mine[:, agree], alternative[:, agree], rtol=1e-4, atol=1e-4)


LEVELS = [(-127.0, -49.0, -10.0, 1.0, 25.0, 113.0), (-1.0, -0.33791524171829224, 0.0, 0.25, 1.0), (-1.0, 1.0)]


def nearest_level(x, levels):
    """Index and value of the level with the least distance; of two equally near ones, the lower one."""
    table = torch.tensor(levels)
    codes = (x[..., None] - table).abs().argmin(-1)
    return codes, table[codes]


def check_levels(rows, columns, levels, masked, seed):
    """A sweep over levels, column by column in plain torch."""
    state, matrix, grid, keep = problem(rows, columns, False, False, masked, seed)
    scale = grid.scale / max(levels)
    actual = native.sweep(state, matrix, ScaledGrid((0, len(levels) - 1), scale, None, levels), keep, with_targets=True)
    rounded, remaining = [], state.clone()
    for i in range(columns):
        target = remaining[i] if keep is None else remaining[i] * keep[i]
        codes, level = nearest_level(target / scale[i], levels)
        move = remaining[i] - level * scale[i]
        remaining[i + 1 :] -= matrix[i, i + 1 :, None] * move
        rounded.append((codes, level * scale[i], move, target))
    same(actual, [torch.stack(tensors) for tensors in zip(*rounded, strict=True)])


def check_nan(device="cpu"):
    """A NaN stays in its row, and in the columns from its own on."""
    state, matrix, grid, keep = problem(40, 40, True, False, False, 1, device=device)
    state[2, 4] = torch.nan
    actual = native.sweep(state, matrix, grid, keep)
    assert actual.codes[2:, 4].isnan().all() and actual.values[2:, 4].isnan().all()
    alternatives = [row for row in range(40) if row != 4]
    assert not actual.values[:, alternatives].isnan().any() and not actual.values[:2].isnan().any()


def check_layouts(device="cpu"):
    """Tensors that are not contiguous, and some without elements."""
    state, matrix, grid, keep = problem(20, 6, False, True, True, 2, device=device)
    expected = native.sweep(state, matrix, grid, keep)
    turned = replace(grid, scale=grid.scale.T.contiguous().T, zero=grid.zero.T.contiguous().T)
    wide = torch.cat([matrix, matrix], dim=1)
    for given_matrix in (matrix.T.contiguous().T, wide[:, :6]):
        actual = native.sweep(state.T.contiguous().T, given_matrix, turned, keep.T.contiguous().T)
        assert torch.equal(actual.codes, expected.codes) and torch.equal(actual.moves, expected.moves)
    ones = torch.ones(20, device=device)
    assert native.sweep(state[:, :0], matrix, ScaledGrid((-8, 7), ones[:0])).codes.shape == (6, 0)
    assert native.sweep(state[:0], matrix[:0, :0], ScaledGrid((-8, 7), ones)).codes.shape == (0, 20)


def check_gptq(plain, symmetric, group, order, regroup, masked, device="cpu", grid="int4"):
    """A sweep of GPTQ and its refinement; rows in which the last bit of a sum decided a code may differ."""
    weight, hessian = random(37, 136, seed=1).to(device), hessian_of(136).to(device)
    columns = hessian.diagonal().argsort(descending=True) if order else None
    ordered = hessian if columns is None else hessian[columns][:, columns]
    factor, _ = inverse_factor(ordered, 0.01)
    mask = random(37, 136, seed=2).to(device) > -0.7 if masked else None
    options = GridOptions(GRIDS[grid], group, symmetric, "absmax", torch.float32)

    def compute():
        rule = round_columns(weight, factor, options, mask, columns, regroup, record_targets=True)
        remaining = weight if mask is None else weight * mask
        return rule, refined(remaining, rule.codes, hessian, 1, torch.float32, mask, columns, signed=symmetric)

    (mine, better), (alternative, expected) = compute(), plain(compute)
    rows = (mine.codes.codes == alternative.codes.codes).all(1) & (better.codes == expected.codes).all(1)
    assert rows.float().mean() > 0.8
    assert torch.allclose(mine.targets[rows], alternative.targets[rows], rtol=1e-3, atol=1e-3)
    assert torch.allclose(better.dense()[rows], expected.dense()[rows], rtol=1e-3, atol=1e-4)


def check_search(plain, symmetric, device="cpu", grid="int4"):
    """The search for scales."""
    parts, importance = random(40, 3, 24).to(device), random(3, 24, seed=1).abs().to(device)

    def search():
        return WeightedSearch(parts, importance, GRIDS[grid], symmetric, torch.float32, None, signed=True).best()

    (scale, zero), (expected, wanted_zero) = search(), plain(search)
    agree = torch.isclose(scale, expected, rtol=1e-5)
    assert agree.float().mean() > 0.95 and (zero is None) == symmetric
    assert zero is None or torch.equal(zero[agree], wanted_zero[agree])
