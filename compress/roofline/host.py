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
from compress.roofline.estimate import StoredWeight, estimate
from compress.roofline.trace import Trace

SIZE = 4096  # of the square weight whose products are timed: larger than the caches
TOKENS = 512  # of the product that is bound by its operations
SMALL = 512  # elements of the sum whose time is that of a call
REPEATS, CALLS = 5, 1000
STEPS = 6  # decoded tokens of a turn, of which the fastest counts
TURNS = 3  # turns of each model, one after the other


def measured_host(dtype: torch.dtype) -> Device:
    """Measure this machine's processor: products in `dtype` with torch's threads, and the time of the shortest call."""
    weight = torch.randn(SIZE, SIZE, dtype=dtype)
    row, rows = torch.randn(1, SIZE, dtype=dtype), torch.randn(TOKENS, SIZE, dtype=dtype)
    small = torch.ones(SMALL, dtype=dtype)

    def calls() -> None:
        for _ in range(CALLS):
            small.add(small)

    with torch.no_grad():
        bandwidth = weight.nbytes / _fastest(lambda: linear(row, weight))
        rate = 2 * TOKENS * SIZE * SIZE / _fastest(lambda: linear(rows, weight))
        call = _fastest(calls) / CALLS
    return Device(HERE, {"float16": rate}, bandwidth, psutil.virtual_memory().total, call)


def with_calls(
    device: Device,
    models: Sequence[PreTrainedModel],
    traces: Sequence[Trace],
    batch: int,
    context: int,
    stored: Mapping[str, StoredWeight],
    itemsize: int,
) -> Device:
    """Measure the time of a call in decode steps of real blocks, in addition to the products' least time.

    Args:
        device: the device.
        models: two models that differ only in their number of blocks, so that everything outside of the blocks cancels
            out.
        traces: one decode step of each model.
        batch: sequences.
        context: tokens of the prompt.
        stored: as of `estimate`.
        itemsize: as of `estimate`.
    """
    short_seconds, long_seconds = decode_seconds(models, batch, context)
    device_without_calls = replace(device, call_seconds=0.0)
    products = [estimate(trace, stored, itemsize, device_without_calls).seconds for trace in traces]
    calls = traces[1].calls - traces[0].calls
    measured = ((long_seconds - short_seconds) - (products[1] - products[0])) / max(calls, 1)
    return replace(device, call_seconds=max(measured, device.call_seconds))


@torch.no_grad()
def decode_seconds(models: Sequence[PreTrainedModel], batch: int, context: int) -> list[float]:
    """Measure the seconds of a decode step of each model.

    The models take turns, so that the load of the machine affects all of them.
    """
    ids, seconds_of_models = torch.zeros(batch, context, dtype=torch.long), [[] for _ in models]
    for _ in range(TURNS):
        for model, seconds in zip(models, seconds_of_models, strict=True):
            cache = model(input_ids=ids, use_cache=True).past_key_values
            for _ in range(STEPS):
                begin = perf_counter()
                model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
                seconds.append(perf_counter() - begin)
    return [min(seconds) for seconds in seconds_of_models]


def _fastest(work: Callable[[], object]) -> float:
    """Return the least seconds of several repetitions, after one to warm up."""
    seconds = []
    for _ in range(REPEATS + 1):
        begin = perf_counter()
        work()
        seconds.append(perf_counter() - begin)
    return min(seconds[1:])
