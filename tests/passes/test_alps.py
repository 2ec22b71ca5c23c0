"""ALPS: near the best mask of all, less error than sparsegpt, and what is known by hand."""

from itertools import combinations

import pytest
import torch
from draws import correlated, random, seen_of

from compress.errors import NumericError
from compress.numerics.sparse.masks import Pattern
from compress.numerics.sparse.operator_splitting import LONGEST, PERIOD, shifted_inverse, split_mask
from compress.passes.contract.observers import CrossGram, Gram
from compress.passes.prune.alps import ALPS
from compress.passes.prune.sparsegpt import SparseGPT

WIDTH = 40
PATTERNS = ["layer", "row", "2:4", "4x1", "4x2"]


def error(found, weight, rows):
    return float(((found - weight) @ rows.T).square().sum())


def best_error(weight, rows, kept):
    """The least error of any mask that keeps so many weights of one row."""
    errors = []
    for columns in combinations(range(weight.shape[1]), kept):
        inside = rows[:, columns].double()
        solution = torch.linalg.lstsq(inside, (rows @ weight[0]).double()[:, None]).solution
        errors.append(float((inside @ solution - (rows @ weight[0]).double()[:, None]).square().sum()))
    return min(errors), sum(errors) / len(errors)


def test_it_is_near_the_best_mask_of_all(layer_of):
    """Over 24 rows of 10 weights, all masks tried: a random mask has 13 times the least error, magnitudes times norms 1.1."""
    found, best, mean = 0.0, 0.0, 0.0
    for seed in range(24):
        rows, weight = correlated(width=10, seed=seed), random(1, 10, seed=seed + 20)
        step = ALPS(damping=1e-6, shrinkage=0, repair=100)
        found += error(step.solve(weight, seen_of(rows), layer_of()).weight, weight, rows)
        least, average = best_error(weight, rows, 5)
        best, mean = best + least, mean + average
    assert best <= found < 1.4 * best < 0.15 * mean


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_error_is_less_than_that_of_sparsegpt(layer_of, pattern):
    options = {"pattern": pattern, "repair": 60, "shrinkage": 0, "damping": 1e-4}
    other, errors = SparseGPT(**options, prune_block=None if ":" in pattern else 20), [0.0, 0.0]
    for seed in range(6):
        rows, weight = correlated(seed=seed), random(16, WIDTH, seed=seed + 50)
        for i, step in enumerate((ALPS(**options), other)):
            found = step.solve(weight, seen_of(rows), layer_of())
            errors[i] += error(found.weight, weight, rows)
            assert torch.equal(found.weight != 0, found.mask) and not found.weight[~found.mask].signbit().any()
            assert int((~found.mask).sum()) == round(found.zeros.expected_sparsity * weight.numel())
    assert errors[0] < 0.98 * errors[1]


def test_a_fixed_mask_gets_its_least_squares():
    """Where the pattern leaves no choice, the iterations end in the optimum of the kept weights."""
    rows, weight = correlated(width=12, seed=1), random(6, 12)
    kept = random(6, 12, seed=9) > 0
    found, mask, _ = split_mask(weight, seen_of(rows).hessian, lambda score: kept, 1e-6)
    best = torch.zeros_like(weight)
    for i, columns in enumerate(kept):
        best[i, columns] = torch.linalg.lstsq(rows[:, columns], (rows @ weight[i])[:, None]).solution[:, 0]
    assert torch.equal(mask, kept) and bool((found[~kept] == 0).all())
    assert error(best, weight, rows) <= error(found, weight, rows) < error(weight * kept, weight, rows)


def test_two_inputs_that_are_nearly_the_same_by_hand(layer_of):
    """x2 = x1 for all tokens but one: a single weight carries the sum of both."""
    rows = torch.tensor([[1.0, 1.0, 0.0]] * 50 + [[0.01, -0.01, 0.0]] + [[0.0, 0.0, 1.0]] * 50)
    weight = torch.tensor([[1.0, 1.1, 0.5]])  # magnitudes would keep the first two
    found = ALPS(sparsity=1 / 3, damping=1e-6, shrinkage=0).solve(weight, seen_of(rows), layer_of())
    torch.testing.assert_close(found.weight, torch.tensor([[0.0, 2.1, 0.5]]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sparsity", [0.05, 0.5, 0.95])
def test_the_mask_settles(sparsity):
    rows, weight = correlated(seed=3), random(32, WIDTH, seed=2)
    keep = lambda score: Pattern("layer").keep(score, 1 - sparsity)  # noqa: E731
    _, mask, iterations = split_mask(weight, seen_of(rows).hessian, keep, 0.01)
    assert iterations < LONGEST and int((~mask).sum()) == round(sparsity * weight.numel())


def test_the_iterations_are_in_the_journal(layer_of, notes):
    ALPS().solve(random(8, WIDTH), seen_of(correlated()), layer_of())
    [(kind, message, figures)] = notes
    assert (kind, message) == ("note", "operator splitting") and PERIOD <= figures["iterations"] < LONGEST


def test_a_layer_that_no_input_reached_is_pruned_by_magnitude(layer_of):
    weight = random(4, 8)
    found = ALPS().solve(weight, seen_of(torch.zeros(3, 8)), layer_of())
    assert torch.equal(found.mask, Pattern("row").keep(weight.abs(), 0.5))
    assert torch.equal(found.weight, weight * found.mask)


def test_channels_without_input_are_pruned_first(layer_of):
    rows = correlated()
    rows[:, :10] = 0
    found = ALPS(pattern="layer").solve(random(8, WIDTH), seen_of(rows), layer_of())
    assert not found.mask[:, :10].any() and bool(found.weight.isfinite().all())


def test_a_hessian_that_is_not_finite_is_an_error():
    hessian = torch.eye(4) * torch.tensor([1.0, torch.nan, 1.0, 1.0])
    with pytest.raises(NumericError, match="holds NaN or infinity"):
        split_mask(random(2, 4), hessian, lambda score: score > 0, 0.01)


def test_a_factorization_that_fails_in_float32_is_done_in_float64(monkeypatch):
    hessian = seen_of(correlated(width=12)).hessian
    expected = torch.linalg.inv(hessian.double() + 0.5 * torch.eye(12)).float()
    torch.testing.assert_close(shifted_inverse(hessian, 0.5), expected, rtol=1e-3, atol=1e-5)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: (matrix, torch.tensor(1)))
    torch.testing.assert_close(shifted_inverse(hessian, 0.5), expected, rtol=1e-3, atol=1e-5)


def test_it_fits_the_uncompressed_output_if_asked():
    assert issubclass(ALPS(error="asymmetric").observer, CrossGram) and ALPS().observer is Gram
