"""Peak memory of a stretch of work: of the process on a CPU, of the device where there is an accelerator."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar

import psutil
import torch

INTERVAL_SECONDS = 0.02


@dataclass(frozen=True)
class ProblemSize:
    """How large the model, the one block or the one linear is that a pass works on, in numbers.

    weights: of its linears that are dense when it comes. scales: of those that are packed. outside: parameters that
    are in no linear of the blocks. passed: inputs and outputs of all linears, per token. vocabulary: 0 of a block.
    length: tokens of an example: of a calibration sequence; of a block, of a batch of them. itemsize: bytes of a number
    of the dense model. packed: weights of the linears that are packed. inputs: widths of the tensors that the pass's
    linears read. largest: the most weights that one linear has. forward_bytes: of a block, what a forward pass of an
    example holds. states_bytes: of a block, its outputs on the whole calibration text.
    shape: (out, in) of the linear, of which nothing else is told but `weights`.
    """

    weights: int
    scales: int
    outside: int
    passed: int
    vocabulary: int
    length: int
    itemsize: int
    packed: int = 0
    inputs: tuple[int, ...] = ()
    largest: int = 0
    forward_bytes: int = 0
    states_bytes: int = 0
    shape: tuple[int, int] = (0, 0)

    @classmethod
    def of_linear(cls, shape: tuple[int, int], itemsize: int) -> ProblemSize:
        """The size of one linear (out, in)."""
        return cls(shape[0] * shape[1], 0, 0, 0, 0, 0, itemsize, shape=shape)


class PeakMemory:
    """A context that watches the resident memory of the process (and the accelerator's) until it ends.

    peak_bytes: the largest value seen, with mapped files counted as the system counts them. One watcher thread
    serves all contexts, so that short stretches cost nothing.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _open: ClassVar[list[PeakMemory]] = []
    _watching: ClassVar[bool] = False

    def __init__(self) -> None:
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        self.peak_bytes = _resident()
        with self._lock:
            self._open.append(self)
            if not PeakMemory._watching:
                PeakMemory._watching = True
                threading.Thread(target=_watch, name="compress-memory", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = max(self.peak_bytes, _resident())
        with self._lock:
            self._open.remove(self)


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken without swapping: the host's, and the device's where that is less."""
    host = psutil.virtual_memory().available
    return min(host, torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else host


_PROCESS = psutil.Process()


def _resident() -> int:
    host = _PROCESS.memory_info().rss
    return host + (torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)


def _watch() -> None:
    """Look at the memory while any context is open; end after a second without one."""
    idle = threading.Event()
    empty = 0.0
    while True:
        idle.wait(INTERVAL_SECONDS)
        now = _resident()
        with PeakMemory._lock:
            for context in PeakMemory._open:
                context.peak_bytes = max(context.peak_bytes, now)
            empty = 0.0 if PeakMemory._open else empty + INTERVAL_SECONDS
            if empty > 1:
                PeakMemory._watching = False
                return
