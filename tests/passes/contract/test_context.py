"""Run: phases add up their time, keep the largest peak, and count work that fails, too."""

import platform
import re
from pathlib import Path
from time import sleep

import pytest
import torch

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no malloc_trim")
def test_a_phase_returns_the_small_tensors_that_it_freed():
    """Tensors that stay lie between those that are freed, so that the heap does not shrink by itself."""

    def anonymous_bytes():
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) << 10

    before, remaining = anonymous_bytes(), []
    with Run().phase("a"):
        freed = []
        for _ in range(4000):
            freed.append(torch.ones(8192))  # 32 KB
            remaining.append(torch.ones(8))
        assert anonymous_bytes() - before > 4000 * 32_000
        del freed
    assert anonymous_bytes() - before < 4000 * 8_000


def test_two_runs_share_nothing():
    with Run().phase("a"):
        pass
    assert Run().costs == {} and Run().journal.entries == []
