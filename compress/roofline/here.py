"""The limits of this machine, as torch reaches them: measured, not published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import psutil
import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from compress.roofline.devices import HERE, Device
from compress.roofline.estimate import Stored, estimate
from compress.roofline.trace import Trace

SIZE = 4096  # of the square weight whose products are timed: larger than the caches
TOKENS = 512  # of the product that is bound by its operations
SMALL = 512  # elements of the sum whose time is that of a call
REPEATS, CALLS = 5, 1000
STEPS = 6  # decoded tokens of a turn, of which the fastest counts
TURNS = 3  # turns of each model, one after the other


def here(dtype: torch.dtype) -> Device:
    """This machine's processor: products in `dtype` with torch's threads, and the time of the shortest call."""
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


def with_calls(
    device: Device,
    models: Sequence[PreTrainedModel],
    traces: Sequence[Trace],
    batch: int,
    context: int,
    stored: Mapping[str, Stored],
    itemsize: int,
) -> Device:
    """The device with the time of a call that decoding with real blocks shows: besides the products' least time.

    models: two that differ in their number of blocks only, so that what is around the blocks cancels out. traces: of
    one decoding step of each. stored, itemsize: as of `estimate`.
    """
    few, many = decode_seconds(models, batch, context)
    plain = replace(device, call_seconds=0.0)
    products = [estimate(one, stored, itemsize, plain).seconds for one in traces]
    calls = traces[1].calls - traces[0].calls
    measured = ((many - few) - (products[1] - products[0])) / max(calls, 1)
    return replace(device, call_seconds=max(measured, device.call_seconds))


@torch.no_grad()
def decode_seconds(models: Sequence[PreTrainedModel], batch: int, context: int) -> list[float]:
    """The seconds of a decoding step of each model, measured in turns: the load of the machine meets all of them."""
    ids, found = torch.zeros(batch, context, dtype=torch.long), [[] for _ in models]
    for _ in range(TURNS):
        for model, seconds in zip(models, found, strict=True):
            cache = model(input_ids=ids, use_cache=True).past_key_values
            for _ in range(STEPS):
                begin = perf_counter()
                model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
                seconds.append(perf_counter() - begin)
    return [min(seconds) for seconds in found]


def _fastest(work: Callable[[], object]) -> float:
    """The least seconds of some repetitions, after one to warm up."""
    seconds = []
    for _ in range(REPEATS + 1):
        begin = perf_counter()
        work()
        seconds.append(perf_counter() - begin)
    return min(seconds[1:])
