"""Repair against least squares solved another way."""

from itertools import pairwise

import pytest
import torch
from draws import correlated, random
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import NumericError
from compress.numerics.repair import repaired, repaired_in_mask


@settings(max_examples=30)
@given(
    width=st.integers(2, 12),
    left=st.integers(1, 11),
    damping=st.sampled_from([1e-4, 0.01, 1.0]),
    seed=st.integers(0, 99),
)
def test_it_is_the_ridge_regression(width, left, damping, seed):
    """The rows X_K and, below them, sqrt(ridge) I are to give X W^T and sqrt(ridge) W_K^T."""
    draw = torch.Generator().manual_seed(seed)
    rows, weight = (torch.randn(n, width, generator=draw, dtype=torch.float64) for n in (40, 3))
    remaining = torch.randperm(width, generator=draw)[: min(left, width - 1)]
    gram = rows.T @ rows
    ridge = damping * gram[remaining][:, remaining].diagonal().mean()
    eye = ridge.sqrt() * torch.eye(len(remaining), dtype=torch.float64)
    expected = torch.linalg.lstsq(
        torch.cat([rows[:, remaining], eye]), torch.cat([rows @ weight.T, eye @ weight[:, remaining].T])
    )
    actual, used = repaired(weight.float(), gram.float(), remaining, damping)
    assert used == damping
    assert torch.allclose(actual.double(), expected.solution.T, atol=2e-3)


def test_what_is_orthogonal_stays_and_what_is_copied_is_added():
    rows = torch.tensor([[1.0, 0, 1], [0, 2, 0], [1, 0, 1]])
    weight = torch.tensor([[3.0, 5, 7]])
    actual, _ = repaired(weight, rows.T @ rows, torch.tensor([0, 1]), 1e-9)
    assert torch.allclose(actual, torch.tensor([[10.0, 5]]), atol=1e-4)


def test_where_nothing_came_by_the_weight_stays():
    weight = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    actual, used = repaired(weight, torch.zeros(3, 3), torch.tensor([2, 0]), 0.01)
    assert torch.equal(actual, weight[:, [2, 0]]) and used == pytest.approx(0.01)


def error(actual, weight, rows):
    return float(((actual - weight) @ rows.T).norm())


def damped_error(actual, weight, gram):
    difference, ridge = (actual - weight).double(), 0.01 * gram.diagonal().mean().double()
    return float((difference @ gram.double() * difference).sum() + ridge * difference.square().sum())


def exact(weight, mask, gram, damping):
    """Each row on its own: G_MM v = (G w)_M, solved densely in float64."""
    damped = gram.double() + damping * gram.double().diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    actual = torch.zeros_like(weight, dtype=torch.float64)
    for i, (row, remaining) in enumerate(zip(weight.double(), mask, strict=True)):
        actual[i, remaining] = torch.linalg.solve(damped[remaining][:, remaining], (damped @ row)[remaining])
    return actual


@settings(max_examples=20)
@given(width=st.integers(2, 24), share=st.floats(0.1, 0.9), seed=st.integers(0, 99))
def test_as_many_steps_as_columns_give_the_optimum_of_the_mask(width, share, seed):
    draw = torch.Generator().manual_seed(seed)
    rows, weight = torch.randn(60, width, generator=draw), torch.randn(5, width, generator=draw)
    mask = torch.rand(5, width, generator=draw) < share
    gram = rows.T @ rows
    actual = repaired_in_mask(weight, weight * mask, mask, gram, 0.01, 2 * width)
    assert bool((actual[~mask] == 0).all())
    torch.testing.assert_close(actual.double(), exact(weight, mask, gram, 0.01), atol=2e-3, rtol=2e-3)


def test_every_step_lowers_the_error_from_any_start():
    rows, weight = correlated(width=40), random(16, 40, seed=1)
    mask, gram = random(16, 40, seed=2) > 0, rows.T @ rows
    start = (weight + random(16, 40, seed=3)) * mask
    errors = [error(repaired_in_mask(weight, start, mask, gram, 1e-6, n), weight, rows) for n in range(0, 10, 2)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.5 * errors[0]
    best = error(exact(weight, mask, gram, 1e-6).float(), weight, rows)
    assert 0.999 * best <= errors[-1] < 1.1 * best


def test_wide_weights_are_solved_block_by_block():
    rows, weight = correlated(width=600), random(4, 600, seed=1)
    mask, gram = random(4, 600, seed=2) > 0, rows.T @ rows

    best, before = (damped_error(item, weight, gram) for item in (exact(weight, mask, gram, 0.01), weight * mask))
    errors = [
        damped_error(repaired_in_mask(weight, weight * mask, mask, gram, 0.01, n), weight, gram) for n in (0, 1, 3, 60)
    ]
    assert errors[0] == before and errors[1] - best < 0.2 * (before - best) and errors[2] - best < 0.1 * (before - best)
    assert best <= errors[3] < 1.01 * best


def test_the_last_round_is_the_first_one_that_gains_less_than_asked_for():
    rows, weight = correlated(width=600), random(4, 600, seed=1)
    mask, gram = random(4, 600, seed=2) > 0, rows.T @ rows
    after = [repaired_in_mask(weight, weight * mask, mask, gram, 0.01, n) for n in range(12)]
    for least_gain in (0.5, 0.1, 0.02):
        actual = repaired_in_mask(weight, weight * mask, mask, gram, 0.01, 99, least_gain)
        count = next(n for n, item in enumerate(after) if torch.equal(item, actual))
        errors = [damped_error(item, weight, gram) for item in after[: count + 1]]
        gains = [1 - new / old for old, new in pairwise(errors)]
        assert gains[-1] < 2 * least_gain and all(gain > least_gain / 2 for gain in gains[:-1])


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_rows_that_have_converged_stay(scale):
    """Also where others still move, and for weights and inputs of any size."""
    rows, weight = correlated(width=12), random(4, 12, seed=1)
    weight[1] *= 1e-6
    mask, gram = random(4, 12, seed=2) > 0, rows.T @ rows
    mask[3] = False
    mask[3, :2] = True
    actual = [repaired_in_mask(weight, weight * mask, mask, gram * scale, 1e-4, n) for n in (100, 400, 1000)]
    assert all(torch.isfinite(item).all() for item in actual)
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-4, atol=1e-6)
    assert torch.equal(actual[2], actual[1])


def test_columns_without_inputs_and_rows_without_weights_stay():
    rows, weight = correlated(width=12), random(4, 12, seed=1)
    rows[:, [2, 7]] = 0
    mask = random(4, 12, seed=2) > 0
    mask[1], mask[2] = False, True
    actual = repaired_in_mask(weight, weight * mask, mask, rows.T @ rows, 0.01, 24)
    assert torch.isfinite(actual).all() and (actual[1] == 0).all()
    assert torch.equal(actual[:, [2, 7]], (weight * mask)[:, [2, 7]])  # nothing is known of them
    torch.testing.assert_close(actual[2], weight[2])  # nothing was removed
    without = repaired_in_mask(weight, weight * mask, mask, torch.zeros(12, 12), 0.01, 24)
    assert torch.equal(without, weight * mask)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_hessian_that_is_not_finite_is_an_error(value):
    gram = torch.eye(4)
    gram[1, 1] = value
    with pytest.raises(NumericError, match="holds NaN or infinity"):
        repaired_in_mask(torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool), gram, 0.01, 2)
