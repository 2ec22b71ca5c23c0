"""The limits of this machine, as torch reaches them: measured, not published."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import psutil
import torch
from torch.nn.functional import linear

from compress.roofline.devices import HERE, Device

SIZE = 4096  # of the square weight whose products are timed: larger than the caches
TOKENS = 512  # of the product that is bound by its operations
SMALL = 512  # elements of the sum whose time is that of a call
REPEATS, CALLS = 5, 1000


def here(dtype: torch.dtype) -> Device:
    """This machine's processor: products in `dtype` with torch's threads, and the time of a call of the framework."""
    weight = torch.randn(SIZE, SIZE, dtype=dtype)
    one, many = torch.randn(1, SIZE, dtype=dtype), torch.randn(TOKENS, SIZE, dtype=dtype)
    small = torch.ones(SMALL, dtype=dtype)

    def calls() -> None:
        for _ in range(CALLS):
            small.add(small)

    with torch.no_grad():
        bandwidth = weight.nbytes / _fastest(lambda: linear(one, weight))
        rate = 2 * TOKENS * SIZE * SIZE / _fastest(lambda: linear(many, weight))
        call = _fastest(calls) / CALLS
    return Device(HERE, {"float16": rate}, bandwidth, psutil.virtual_memory().total, call)


def _fastest(work: Callable[[], object]) -> float:
    """The least seconds of some repetitions, after one to warm up."""
    seconds = []
    for _ in range(REPEATS + 1):
        begin = perf_counter()
        work()
        seconds.append(perf_counter() - begin)
    return min(seconds[1:])
