"""Peak memory: what was there for a moment inside of the context is seen, what came before or after is not."""

import threading
from time import sleep

import torch

from compress.passes.contract.memory import INTERVAL_SECONDS, PeakMemory, memory_of

BIG = 128 << 20


def hold():
    """Take BIG bytes for long enough to be seen."""
    tensor = torch.ones(BIG, dtype=torch.uint8)
    sleep(10 * INTERVAL_SECONDS)
    del tensor


def test_a_moment_inside_is_seen_and_one_before_is_not():
    hold()
    with PeakMemory() as before:
        sleep(2 * INTERVAL_SECONDS)
    with PeakMemory() as during:
        hold()
    with PeakMemory() as after:
        sleep(2 * INTERVAL_SECONDS)
    for other in (before, after):
        assert during.peak_bytes - other.peak_bytes > 0.8 * BIG


def test_contexts_may_overlap():
    with PeakMemory() as outer:
        with PeakMemory() as inner:
            sleep(2 * INTERVAL_SECONDS)
        hold()
    assert outer.peak_bytes - inner.peak_bytes > 0.8 * BIG


def test_one_watcher_serves_all_and_none_is_left_open():
    closed = [PeakMemory() for _ in range(50)]
    for context in closed:
        with context:
            pass
    assert sum(thread.name == "compress-memory" for thread in threading.enumerate()) <= 1
    seen = [context.peak_bytes for context in closed]
    with PeakMemory() as open_:
        hold()
    assert [context.peak_bytes for context in closed] == seen and open_.peak_bytes > seen[0]


class Device:
    """The memory of an accelerator: `allocate` holds so many bytes for a moment."""

    def __init__(self):
        self.held = self.largest = 0

    def allocate(self, size):
        self.largest = max(self.largest, self.held + size)

    def peak_bytes(self):
        return self.largest

    def reset(self):
        self.largest = self.held


def test_the_peak_of_an_accelerator_is_that_inside_of_each_context():
    device, other = Device(), Device()
    device.allocate(100)
    with PeakMemory(device) as outer:
        device.allocate(5)
        with PeakMemory(device) as inner, PeakMemory(other) as elsewhere:
            device.allocate(3)
        with PeakMemory(device) as later:
            device.held = 2
        device.allocate(1)
    assert [outer.device_bytes, inner.device_bytes, later.device_bytes, elsewhere.device_bytes] == [5, 3, 0, 0]


def test_without_an_accelerator_none_is_measured():
    with PeakMemory(memory_of(torch.device("cpu"))) as found:
        hold()
    assert found.device_bytes == 0 and found.peak_bytes > BIG
    device = memory_of(torch.device("cuda"))
    assert device == memory_of(torch.device("cuda")) and device is not None
    with PeakMemory(device) as found:  # which is not used
        pass
    assert torch.cuda.is_initialized() or found.device_bytes == 0
