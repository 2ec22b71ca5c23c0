"""Statistics against numbers worked out by hand, a brute-force enumeration, and published examples."""

import itertools
import math
import statistics

import pytest

from compress.numerics.statistics import (
    Flips,
    difference_interval,
    flips,
    jackknife,
    mcnemar,
    mean,
    quantile,
    ratio,
)


def test_the_error_of_a_mean():
    actual = mean([1.0, 2.0, 4.0])
    assert actual.value == pytest.approx(7 / 3)
    assert actual.stderr == pytest.approx(statistics.stdev([1, 2, 4]) / math.sqrt(3))
    assert mean([3.0]) == (3.0, None)


def test_a_ratio_of_equal_clusters_is_a_mean():
    totals = [2.0, 6.0, 7.0]
    assert ratio(totals, [2, 2, 2]) == pytest.approx(mean([1.0, 3.0, 3.5]))
    assert ratio([4.0], [2]) == (2.0, None)


def test_the_error_of_a_ratio_by_hand():
    # r = 6/3 = 2, residuals 1 - 2*1 = -1 and 5 - 2*2 = 1; var = 2 * 2 / (1 * 9)
    assert ratio([1.0, 5.0], [1, 2]) == pytest.approx((2.0, math.sqrt(4 / 9)))


def test_flips_in_both_directions():
    assert flips([0, 0, 1, 1, 1], [0, 1, 1, 0, 0]) == Flips(gained=1, lost=2, same=2)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (0, 1), (1, 4), (3, 3), (0, 7), (5, 2)])
def test_mcnemar_is_the_share_of_coin_series_that_are_as_extreme(gained, lost):
    count = gained + lost
    series = [sum(coins) for coins in itertools.product((0, 1), repeat=count)]
    extreme = sum(abs(2 * heads - count) >= abs(gained - lost) for heads in series)
    assert mcnemar(gained, lost) == pytest.approx(extreme / len(series))


def test_mcnemar_of_many_flips_is_a_number():
    assert 0 < mcnemar(4000, 4200) < 0.05 and mcnemar(5000, 5000) == 1.0


def test_the_interval_has_width_without_flips_and_contains_the_difference():
    low, high = difference_interval(Flips(0, 0, 50))
    assert low < 0 < high and high == pytest.approx(-low)
    low, high = difference_interval(Flips(30, 10, 60))
    assert 0 < low < 0.2 < high
    # by hand: n = 102, cells 30.5 and 10.5: 20 / 102 -+ 1.96 * sqrt(41 - 400 / 102) / 102
    assert (low + high) / 2 == pytest.approx(20 / 102)
    assert high - low == pytest.approx(2 * 1.959964 * math.sqrt(41 - 400 / 102) / 102)


def test_the_jackknife_of_a_mean_is_its_error():
    values = [1.0, 4.0, 2.0, 8.0, 5.0]
    assert jackknife(lambda items: sum(items) / len(items), values) == pytest.approx(mean(values).stderr)
    assert jackknife(sum, [1.0]) is None


def test_quantiles_between_the_values():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.99) == pytest.approx(9.9) and quantile([7.0], 0.99) == 7.0
