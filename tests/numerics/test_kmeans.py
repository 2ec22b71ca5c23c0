"""k-means of numbers: by hand, against every way to divide a few values, and what ties and zero weights do."""

from itertools import combinations

import pytest
import torch
from draws import random
from hypothesis import given
from hypothesis import strategies as st

from compress.numerics.kmeans import Lloyd, assign, clusters, kmeans


def least_error(values, weights, count):
    """The least error of all ways to cut the sorted values into ranges."""
    values, order = values.sort()
    weights = weights[order]
    best = torch.inf
    for cuts in combinations(range(1, len(values)), count - 1):
        total = 0.0
        for part, mass in zip(values.tensor_split(cuts), weights.tensor_split(cuts), strict=True):
            mean = (part * mass).sum() / mass.sum()
            total += float((mass * (part - mean).square()).sum())
        best = min(best, total)
    return best


def test_by_hand():
    # Two clusters of {0, 1, 10}: {0, 1} and {10}; a weight of 3 at 1 moves the mean of the first to 3/4.
    values = torch.tensor([[10.0, 0.0, 1.0]]).repeat(2, 1)
    weights = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 3.0]])
    centers = kmeans(values, weights, 2)
    assert centers.tolist() == [[0.5, 10.0], [0.75, 10.0]]
    assert assign(values, centers).tolist() == [[1, 0, 0], [1, 0, 0]]


@given(st.integers(0, 200), st.integers(2, 4))
def test_it_is_near_the_best_of_all_ways_and_never_worse_than_its_starts(seed, count):
    values, weights = random(1, 9, seed=seed), random(1, 9, seed=seed + 1).square() + 0.1
    lloyd = Lloyd(values, weights)
    actual = float(lloyd.error(kmeans(values, weights, count)))
    best = least_error(values[0].double(), weights[0].double(), count)
    assert actual >= best - 1e-9
    starts = [float(lloyd.error(start)) for start in (lloyd.equal_mass(count), lloyd.equal_range(count))]
    assert actual <= min(starts) + 1e-9


def test_most_of_the_time_it_is_the_best():
    rows = [(random(1, 10, seed=s), random(1, 10, seed=s + 500).square() + 0.1) for s in range(60)]
    ratios = [float(Lloyd(v, w).error(kmeans(v, w, 3))) / least_error(v[0].double(), w[0].double(), 3) for v, w in rows]
    assert sum(ratio < 1 + 1e-6 for ratio in ratios) >= 35 and sorted(ratios)[30] < 1.01


def test_the_error_never_rises():
    lloyd = Lloyd(random(4, 300), random(4, 300, seed=1).square())
    errors = torch.stack([lloyd.error(centers) for centers in lloyd.steps(lloyd.equal_range(8))])
    assert bool((errors.diff(dim=0) <= 1e-9).all()) and len(errors) > 3


def test_constant_rows_and_rows_without_weight():
    constant = torch.full((1, 20), 0.3)
    centers = kmeans(constant, torch.ones_like(constant), 4)
    nearest = centers.gather(1, assign(constant, centers))
    torch.testing.assert_close(nearest.float(), constant)
    values = random(1, 50)
    assert torch.equal(kmeans(values, torch.zeros_like(values), 4), kmeans(values, torch.ones_like(values), 4))


@pytest.mark.parametrize("count", [2, 4])
def test_values_without_weight_do_not_move_a_center(count):
    values = random(3, 40)
    weights = torch.ones_like(values)
    far = torch.cat([values, torch.full((3, 2), 50.0)], 1)
    centers = kmeans(far, torch.cat([weights, torch.zeros(3, 2)], 1), count)
    used = centers.gather(1, assign(values, centers))
    expected = kmeans(values, weights, count)
    errors = [(values - nearest).square().sum() for nearest in (used, expected.gather(1, assign(values, expected)))]
    assert float(errors[0]) <= 1.3 * float(errors[1])  # another local minimum, but no center is lost to the far ones


# Points


def points_error(points, actual):
    return sum(float((points[actual == c] - points[actual == c].mean(0)).square().sum()) for c in actual.unique())


def test_points_of_three_corners_are_three_clusters():
    corners = torch.tensor([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0]])
    points = corners.repeat(4, 1) + random(12, 2)
    actual = clusters(points, 3)
    assert torch.equal(actual, actual[:3].repeat(4)) and len(actual[:3].unique()) == 3


@given(st.integers(0, 50))
def test_clusters_of_points_are_near_the_best_of_all_ways_and_stable(seed):
    points = random(6, 2, seed=seed)
    ways = (torch.tensor([(way >> i) & 1 for i in range(6)]) for way in range(1, 2**5))
    least = min(points_error(points, way) for way in ways)
    actual = clusters(points, 2)
    assert points_error(points, actual) <= 1.1 * least
    centers = torch.stack([points[actual == c].mean(0) for c in range(2)])
    assert torch.equal((points[:, None] - centers).square().sum(2).argmin(1), actual)


def test_more_clusters_than_points_leave_some_empty():
    actual = clusters(torch.tensor([[1.0, 1.0], [1.0, 1.0], [5.0, 0.0]]), 4)
    assert actual[0] == actual[1] != actual[2] and int(actual.max()) < 4
