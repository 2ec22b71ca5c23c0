"""Run: phases add up their time, keep the largest peak, and count work that fails, too."""

from time import sleep

import pytest

from compress.passes.contract.context import Run


def test_parts_of_a_phase_add_up():
    run = Run()
    for _ in range(2):
        with run.phase("a"):
            sleep(0.02)
    assert run.costs["a"].seconds >= 0.04 and run.costs["a"].peak_bytes > 0


def test_the_peak_is_the_largest_of_the_parts():
    run = Run()
    with run.phase("a"):
        pass
    run.costs["a"].peak_bytes = 1 << 60
    with run.phase("a"):
        pass
    assert run.costs["a"].peak_bytes == 1 << 60


def test_a_phase_that_fails_is_counted():
    run = Run()
    with pytest.raises(ValueError), run.phase("a"):
        sleep(0.01)
        raise ValueError
    assert run.costs["a"].seconds >= 0.01


def test_phases_may_stand_in_one_another():
    run = Run()
    with run.phase("outer"), run.phase("inner"):
        sleep(0.01)
    assert run.costs["outer"].seconds >= run.costs["inner"].seconds >= 0.01


def test_two_runs_share_nothing():
    with Run().phase("a"):
        pass
    assert Run().costs == {} and Run().journal.entries == []
