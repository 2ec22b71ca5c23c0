"""Two binary planes: scales and signs by hand, and against a search over all of them."""

import itertools

import pytest
import torch
from draws import random

from compress.numerics.quant.planes import (
    alternated,
    greedy,
    levels_of,
    nearest_level,
    nearest_signs,
    residual_error,
    residual_scales,
    signs_of,
    split_errors,
    split_scales,
)


def split_error(values):
    """Of all columns."""
    return next(split_errors(values, torch.arange(values.shape[1]), [0]))


def error(values, a, b):
    """The least squared error of each row: every weight at the nearest of the four levels, one by one."""
    actual = []
    for row, first_result, second in zip(values.tolist(), a.tolist(), b.tolist(), strict=True):
        levels = [s * first_result + t * second for s in (-1, 1) for t in (-1, 1)]
        actual.append(sum(min((w - level) ** 2 for level in levels) for w in row))
    return torch.tensor(actual)


def test_by_hand():
    values = torch.tensor([[1.0, -1.0, 4.0, -6.0]])
    # mean |w| = 3; |w| - 3 is -2, -2, 1, 3 and has the mean magnitude 2
    assert [float(s) for s in residual_scales(values)] == [3.0, 2.0]
    # 3 + 2 and 3 - 2 for 1, 1, 4, 6: 0 + 0 + 1 + 1
    assert residual_error(values).tolist() == [2.0]
    # the sets are 1, 1 and 4, 6: levels 1 and 5, so a = 3 and b = 2
    assert [float(s) for s in split_scales(values)] == [3.0, 2.0]
    assert split_error(values).tolist() == [2.0]
    signs = nearest_signs(values, torch.tensor([3.0]), torch.tensor([2.0]))
    assert [sign.tolist() for sign in signs] == [[[1, -1, 1, -1]], [[-1, 1, 1, -1]]]


def test_what_is_left_can_be_larger_than_the_first_plane():
    # mean |w| = 1, and what is left of it is 1, 1, 1, 1, 1, 1, 1, 7: its mean magnitude is 1.75
    a, b = residual_scales(torch.tensor([[0.0] * 7 + [8.0]]))
    assert (a.item(), b.item()) == (1.75, 1.0)


def test_the_break_point_is_the_best_one():
    values = random(5, 9)
    a, b = split_scales(values)
    for row in range(5):
        best = float("inf")
        ordered = sorted(values[row].abs().tolist())
        for cut in range(1, 10):
            parts = [part for part in (ordered[:cut], ordered[cut:]) if part]
            best = min(best, sum((w - sum(part) / len(part)) ** 2 for part in parts for w in part))
        assert split_error(values)[row].item() == pytest.approx(best, rel=1e-4)
    torch.testing.assert_close(split_error(values), error(values, a, b), rtol=1e-4, atol=1e-5)
    assert (split_error(values) <= residual_error(values) + 1e-5).all()


def test_errors_of_the_columns_after_each_count_are_those_of_these_columns_alone():
    values, counts = random(5, 24), (1, 2, 7, 23)
    values[1], values[:, 3] = 0.5, -0.5  # equal magnitudes
    order = random(24, seed=4).argsort()
    for count, actual in zip(counts, split_errors(values, order, counts), strict=True):
        torch.testing.assert_close(actual, split_error(values[:, order[count:]]), rtol=1e-4, atol=1e-5)


def test_signs_are_those_of_the_nearest_level():
    values, a, b = random(3, 50), torch.tensor([1.0, 0.8, 0.5]), torch.tensor([0.3, 0.8, 0.0])
    first_result, second = nearest_signs(values, a[:, None], b[:, None])
    actual = ((values - first_result * a[:, None] - second * b[:, None]) ** 2).sum(1)
    torch.testing.assert_close(actual, error(values, a, b))


def test_one_weight_is_a_set_alone():
    a, b = split_scales(torch.tensor([[-2.0]]))
    assert (a.item(), b.item()) == (2.0, 0.0)
    assert list(itertools.chain(*split_error(torch.tensor([[-2.0]]))[None].tolist())) == [0.0]


def test_greedy_planes_by_hand():
    # mean |w| = 3 leaves -2, 2, 1, -3 of 1, -1, 4, -6 with mean 2; that leaves 0, 0, -1, -1 with mean 0.5
    scales = greedy(torch.tensor([[1.0, -1.0, 4.0, -6.0]]), torch.ones(4), 3)
    assert scales.tolist() == [[3.0, 2.0, 0.5]]
    weighed = greedy(torch.tensor([[1.0, 3.0]]), torch.tensor([3.0, 1.0]), 1)
    assert weighed.tolist() == [[1.5]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_levels_are_all_sums_and_the_nearest_is_taken(count):
    scales, values = random(4, count).abs(), random(4, 30, seed=1) * 2
    levels = levels_of(scales)
    for row in range(4):
        sums = [
            sum(s * float(a) for s, a in zip(signs, scales[row], strict=True))
            for signs in itertools.product((-1, 1), repeat=count)
        ]
        assert sorted(levels[row].tolist()) == pytest.approx(sorted(sums), abs=1e-6)
    index = nearest_level(values, scales)
    actual = (signs_of(index, count) * scales[:, None]).sum(-1)
    torch.testing.assert_close(actual, levels.gather(1, index))
    torch.testing.assert_close(
        (actual - values).abs(), (levels[:, None] - values[..., None]).abs().amin(-1), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_turns_lower_the_weighted_error_until_no_scale_is_better(count):
    values, weights = random(6, 60), random(60, seed=3).square() + 0.1

    def weighted_error(scales, index=None):
        index = nearest_level(values, scales) if index is None else index
        return ((levels_of(scales).gather(1, index) - values).square() * weights).sum(1)

    start = greedy(values, weights, count)
    errors = [weighted_error(start)]
    for rounds in (1, 4, 60):
        errors.append(weighted_error(alternated(values, weights, start, rounds)))
        assert (errors[-1] <= errors[-2] * (1 + 1e-5)).all()
    end = alternated(values, weights, start, 60)
    assert (end > 0).all() and (end.diff(dim=1) <= 0).all()
    for plane in range(count):
        for factor in (0.98, 1.02):
            moved = end.clone()
            moved[:, plane] *= factor
            assert (weighted_error(moved, nearest_level(values, end)) >= errors[-1] * (1 - 1e-4)).all()


def test_planes_that_are_equal_have_no_best_scales_and_stay():
    scales = alternated(torch.tensor([[3.0, 3.0, -3.0, -3.0]]), torch.ones(4), torch.tensor([[2.0, 1.0]]), 3)
    assert scales.tolist() == [[2.0, 1.0]]
