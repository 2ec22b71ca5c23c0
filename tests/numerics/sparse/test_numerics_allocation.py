"""Sharing out sparsity: against the paper's formula, one sort over everything, and brute force."""

import itertools

import pytest
import torch
from draws import random
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.numerics.sparse.allocation import (
    ScoreHistogram,
    below_threshold,
    envelope,
    in_proportion,
    ladder,
    least_error,
    outlier_weighted,
)

# Outlier-weighed


def test_outlier_weighed_by_hand():
    # ratios 0, 1, 3: densities 0, 0.05, 0.15 above the lowest, mean 1/15; sparsity 0.6 less what is above the mean
    actual = outlier_weighted({"a": 0.0, "b": 1.0, "c": 3.0}, {"a": 1, "b": 1, "c": 1}, 0.6, max_deviation=0.075)
    mean = 0.2 / 3
    assert actual == pytest.approx({"a": 0.6 + mean, "b": 0.6 + mean - 0.05, "c": 0.6 + mean - 0.15})


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 1000)), min_size=1, max_size=8),
    st.floats(0.25, 0.75),
    st.floats(0.01, 0.1),
)
def test_outlier_weighed_keeps_the_mean_and_stays_in_range(layers, sparsity, most):
    ratios = {str(i): ratio for i, (ratio, _) in enumerate(layers)}
    sizes = {str(i): size for i, (_, size) in enumerate(layers)}
    actual = outlier_weighted(ratios, sizes, sparsity, most)
    mean = sum(actual[n] * sizes[n] for n in sizes) / sum(sizes.values())
    assert mean == pytest.approx(sparsity)
    assert max(actual.values()) - min(actual.values()) <= 2 * most + 1e-9
    by_ratio = sorted(ratios, key=ratios.__getitem__)
    assert all(actual[a] >= actual[b] - 1e-12 for a, b in itertools.pairwise(by_ratio))


def test_equal_ratios_are_uniform():
    assert outlier_weighted({"a": 0.2, "b": 0.2}, {"a": 3, "b": 5}, 0.6, 0.08) == {"a": 0.6, "b": 0.6}


def test_a_layer_must_keep_something_and_lose_something():
    with pytest.raises(ValueError, match="would get a sparsity of 1.03 from sparsity 0.95 and lambda 0.08"):
        outlier_weighted({"a": 0.0, "b": 1.0}, {"a": 1, "b": 1}, 0.95, 0.08)
    with pytest.raises(ValueError, match="would get a sparsity of -0.03"):
        outlier_weighted({"a": 0.0, "b": 1.0}, {"a": 1, "b": 1}, 0.05, 0.08)


# One threshold


@settings(max_examples=40)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=5), st.floats(0.01, 0.99), st.integers(0, 10**6))
def test_of_weights_in_16_bits_the_threshold_is_that_of_one_sort(sizes, sparsity, seed):
    layers = {str(i): random(n, seed=seed + i).abs().half().float() for i, n in enumerate(sizes)}
    actual = below_threshold({n: ScoreHistogram.of(s) for n, s in layers.items()}, sparsity)
    everything = torch.cat(list(layers.values())).sort().values
    expected = round(sparsity * everything.numel())
    assert sum(actual.values()) == expected
    if expected:
        cut = everything[expected - 1]  # ties at the threshold may be in any layer
        for name, scores in layers.items():
            assert int((scores < cut).sum()) <= actual[name] <= int((scores <= cut).sum())


def test_of_weights_in_32_bits_the_threshold_is_that_of_one_sort_to_a_fraction():
    layers = {str(i): random(5000, seed=i).abs() * (i + 1) for i in range(4)}
    actual = below_threshold({n: ScoreHistogram.of(s) for n, s in layers.items()}, 0.5)
    assert sum(actual.values()) == 10000
    cut = torch.cat(list(layers.values())).sort().values[9999]
    for name, scores in layers.items():
        assert abs(actual[name] - int((scores <= cut).sum())) <= 3
    assert actual["0"] > 2 * actual["3"]


def test_scores_below_zero_go_with_the_zeros():
    histogram = ScoreHistogram.of(torch.tensor([-1.0, 0.0, -1.0, 2.0, 2.0, 3.0]))
    assert histogram.counts.tolist() == [3, 2, 1]
    assert histogram.total == 6


def test_equal_scores_are_shared_out_in_proportion():
    layers = {
        "a": ScoreHistogram.of(torch.ones(30)),
        "b": ScoreHistogram.of(torch.ones(10)),
        "c": ScoreHistogram.of(torch.zeros(4)),
    }
    assert below_threshold(layers, 24 / 44) == {"a": 15, "b": 5, "c": 4}


@settings(max_examples=50)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.floats(0, 1))
def test_proportions_are_whole_and_sum_up(weights, share):
    total = int(share * sum(weights))
    parts = in_proportion(total, weights)
    assert sum(parts) == total
    assert all(0 <= part <= weight for part, weight in zip(parts, weights, strict=True))
    if sum(weights):
        assert all(abs(p - total * w / sum(weights)) < 1 for p, w in zip(parts, weights, strict=True))


# Least error


def test_least_error_by_hand():
    # a costs 1 per 0.1 throughout, b nothing up to 0.5 and much beyond it
    curves = {"a": [(0.3, 0.0), (0.5, 2.0), (0.7, 4.0)], "b": [(0.3, 0.0), (0.5, 0.0), (0.7, 100.0)]}
    assert least_error(curves, {"a": 1, "b": 1}, 0.5) == pytest.approx({"a": 0.5, "b": 0.5})
    assert least_error(curves, {"a": 1, "b": 1}, 0.45) == pytest.approx({"a": 0.4, "b": 0.5})
    assert least_error(curves, {"a": 1, "b": 3}, 0.4) == pytest.approx({"a": 0.3, "b": 1.3 / 3})


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 8))
def test_least_error_is_the_optimum_by_brute_force(seed, budget):
    """Convex curves on a grid, layers of one size: no choice of rungs with the same sum costs less."""
    generator = torch.Generator().manual_seed(seed)
    rungs, curves = [0.3, 0.4, 0.5, 0.6, 0.7], {}
    for name in "abc":
        slopes = torch.rand(4, generator=generator).sort().values.cumsum(0)
        curves[name] = list(zip(rungs, [0.0, *slopes.tolist()], strict=True))
    target = 0.3 + 0.1 * budget / 3
    actual = least_error(curves, dict.fromkeys("abc", 7), target)
    assert sum(actual.values()) == pytest.approx(3 * target)
    lookup = {name: dict(enumerate(error for _, error in curve)) for name, curve in curves.items()}
    best = min(
        sum(lookup[name][step] for name, step in zip("abc", steps, strict=True))
        for steps in itertools.product(range(5), repeat=3)
        if sum(steps) == budget
    )
    mine = sum(lookup[name][round((actual[name] - 0.3) / 0.1)] for name in "abc")
    assert mine == pytest.approx(best)


def test_the_envelope_leaves_out_what_is_above_a_chord():
    assert envelope([(0.0, 0.0), (0.1, 3.0), (0.2, 1.0), (0.3, 9.0)]) == [(0.0, 0.0), (0.2, 1.0), (0.3, 9.0)]
    assert envelope([(0.0, 1.0), (0.1, 1.0), (0.2, 1.0)]) == [(0.0, 1.0), (0.2, 1.0)]


def test_the_ladder_stays_between_zero_and_one():
    assert ladder(0.5, 0.1, 3) == pytest.approx([0.4, 0.5, 0.6])
    assert ladder(0.95, 0.2, 2) == pytest.approx([0.75, 0.975])
    assert ladder(0.1, 0.2, 2) == pytest.approx([0.05, 0.3])
