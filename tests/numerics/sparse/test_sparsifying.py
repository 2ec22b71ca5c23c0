"""Zeros chosen inside the sweep: against the textbook recursion with masks chosen as the paper does, and spans."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.numerics import column_sweep as obs
from compress.numerics.column_sweep import sweep
from compress.numerics.linalg import inverse_factor
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.rounding import GridOptions, Rounding
from compress.numerics.sparse.masks import Pattern
from compress.numerics.sparse.sparsifying import Sparsifying, order_by


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(rows, width, seed=0):
    """A weight, and the factor of the inverse of a Hessian of correlated inputs."""
    inputs = random(3 * width, width, seed=seed + 100) + random(3 * width, 1, seed=seed + 200)
    return random(rows, width, seed=seed), factor_of(inputs.T @ inputs)


def factor_of(hessian):
    return torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)


def paper(weight, factor, block, density, n_of_m=None):
    """Algorithm 1 of the paper as it is written, one column at a time; (weight, mask)."""
    work, width = weight.clone(), weight.shape[1]
    mask = torch.ones_like(work, dtype=torch.bool)
    for j in range(width):
        if n_of_m is None and j % block == 0:
            columns = slice(j, min(j + block, width))
            cost = (work[:, columns] / factor.diagonal()[columns]).square()
            part = torch.zeros_like(cost, dtype=torch.bool).flatten()
            part[cost.flatten().argsort(descending=True)[: round(density * cost.numel())]] = True
            mask[:, columns] = part.view_as(cost)
        if n_of_m is not None and j % n_of_m[1] == 0 and j + n_of_m[1] <= width:
            columns = slice(j, j + n_of_m[1])
            cost = (work[:, columns] / factor.diagonal()[columns]).square()
            mask[:, columns] = torch.zeros_like(cost, dtype=torch.bool).scatter_(1, cost.topk(n_of_m[0]).indices, True)
        remaining = work[:, j] * mask[:, j]
        error = (work[:, j] - remaining) / factor[j, j]
        work[:, j:] -= error[:, None] * factor[j, j:]
        work[:, j] = remaining
    return work, mask


@pytest.mark.parametrize("width", [7, 40, 150, 300])
@pytest.mark.parametrize("block", [16, 37, 128])
def test_zeros_by_blocks_of_columns_are_those_of_the_paper(width, block):
    weight, factor = problem(6, width, seed=width)
    rule = Sparsifying(Pattern("layer"), 0.4, block, factor.diagonal(), 6)
    actual = rule(weight, factor)
    expected, mask = paper(weight, factor, block, 0.4)
    assert torch.equal(rule.kept(None), mask)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=30)
@given(
    width=st.integers(1, 90),
    n_of_m=st.sampled_from([(2, 4), (1, 4), (1, 2), (4, 8), (3, 7), (8, 16), (16, 32), (5, 20)]),
    seed=st.integers(0, 10**6),
)
def test_zeros_of_each_m_columns_are_those_of_the_paper(width, n_of_m, seed):
    weight, factor = problem(5, width, seed=seed)
    rule = Sparsifying(Pattern(f"{n_of_m[0]}:{n_of_m[1]}"), 0.5, 128, factor.diagonal(), 5)
    actual = rule(weight, factor)
    expected, mask = paper(weight, factor, 0, 0.5, n_of_m)
    assert torch.equal(rule.kept(None), mask)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("part", [1, 8, 100])
@pytest.mark.parametrize("leaf", [1, 6, 64])
def test_what_is_looked_at_is_made_up_for_however_columns_are_cut(monkeypatch, part, leaf):
    weight, factor = problem(3, 53, seed=7)
    expected, _ = paper(weight, factor, 0, 0.5, (2, 6))
    monkeypatch.setattr(obs, "PART", part)
    monkeypatch.setattr(obs, "LEAF", leaf)
    actual = Sparsifying(Pattern("2:6"), 0.5, 128, factor.diagonal(), 3)(weight, factor)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_what_is_pruned_already_counts_and_stays():
    weight, factor = problem(8, 64)
    mask = random(8, 64, seed=9) > -0.3
    for text in ("layer", "row", "2:4", "4x1"):
        rule = Sparsifying(Pattern(text), 0.5, 32, factor.diagonal(), 8, mask)
        actual = rule(weight * mask, factor)
        assert (actual[~mask] == 0).all() and not (rule.kept(None) & ~mask).any()
        assert int(rule.kept(None).sum()) <= 8 * 32
        assert (actual[rule.kept(None)] != 0).all()
    assert int(Sparsifying(Pattern("layer"), 0.5, 64, factor.diagonal(), 8, mask).kept(None).sum()) == 8 * 64
    rule = Sparsifying(Pattern("layer"), 0.5, 32, factor.diagonal(), 8, mask)
    rule(weight * mask, factor)
    assert int(rule.kept(None).sum()) == 8 * 32  # of fewer than half nothing more would have been removed


def test_columns_that_cost_nothing_go_first():
    weight, factor = problem(4, 16)
    pivots = factor.diagonal().clone()
    pivots[[3, 8]] = torch.inf
    rule = Sparsifying(Pattern("row"), 0.75, 16, pivots, 4)
    rule(weight, factor)
    assert not rule.kept(None)[:, [3, 8]].any()
    blind = Sparsifying(Pattern("row"), 0.5, 16, torch.full_like(pivots, torch.inf), 4)
    blind(weight, torch.eye(16, dtype=torch.float64))
    assert torch.equal(blind.kept(None), Pattern("row").keep(weight.abs(), 0.5))  # by magnitude


def joint(weight, factor, pattern, size, block, grid="int4", symmetric=True):
    def rounding(keep):
        rule = Rounding(weight, GridOptions(GRIDS[grid], size, symmetric, "absmax", torch.float32))
        rule.keep = keep.T
        return rule

    rule = Sparsifying(Pattern(pattern), 0.5, block, factor.diagonal(), weight.shape[0], None, rounding)
    return rule, rule(weight, factor)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("size", "block"), [(16, 32), (32, 32), (64, 32), (24, 32)])
@pytest.mark.parametrize("pattern", ["layer", "row", "2:4", "4x2"])
def test_what_is_rounded_is_what_is_kept(pattern, size, block, symmetric):
    weight, factor = (t.float() for t in problem(8, 100))
    rule, actual = joint(weight, factor, pattern, size, block, symmetric=symmetric)
    codes = rule.inner.codes
    assert torch.equal(codes.dense(), actual)
    assert (actual[~rule.kept(None)] == 0).all()
    full = rule.kept(None)[:, :96]
    if pattern == "2:4":
        assert (full.reshape(-1, 4).sum(1) == 2).all()
    else:
        assert float(full.float().mean()) == pytest.approx(0.5, abs=0.02)


def test_with_independent_inputs_it_is_pruning_and_then_rounding_what_is_left():
    weight = random(6, 64).float()
    rule, actual = joint(weight, torch.eye(64), "2:4", 16, 32)
    keep = Pattern("2:4").keep(weight.abs(), 0.5)
    alone = Rounding(weight, GridOptions(GRIDS["int4"], 16, True, "absmax", torch.float32), keep)
    assert torch.equal(rule.kept(None), keep)
    assert torch.equal(actual, sweep(weight * keep, torch.eye(64), alone))
    assert torch.equal(rule.inner.codes.scale, alone.codes.scale)


def test_later_columns_make_up_for_rounding_too():
    for seed in range(6):
        weight = random(16, 64, seed=seed).float()
        inputs = random(200, 64, seed=seed + 50) + 2 * random(200, 1, seed=seed + 60)
        factor, _ = inverse_factor((inputs.T @ inputs).float(), 0.01)
        _, once = joint(weight, factor, "2:4", 16, 64, grid="int3")
        pruned = Sparsifying(Pattern("2:4"), 0.5, 64, factor.diagonal(), 16)
        first_result = pruned(weight, factor)
        nearest = quantize(first_result, GRIDS["int3"], 16, mask=pruned.kept(None)).dense()
        actual, rounded = (float(((w - weight) @ inputs.T.float()).norm()) for w in (once, nearest))
        assert actual < 0.9 * rounded


def test_columns_that_are_decided_together_stay_together():
    diagonal = torch.tensor([1.0, 9, 2, 2, 5, 7, 8])
    assert order_by(diagonal, 1).tolist() == [1, 6, 5, 4, 2, 3, 0]
    assert order_by(diagonal, 2).tolist() == [4, 5, 0, 1, 2, 3, 6]
    assert order_by(diagonal, 3).tolist() == [3, 4, 5, 0, 1, 2, 6]
    assert order_by(diagonal, 9).tolist() == list(range(7))
