"""Measure peak memory: of the process, and apart from it of the accelerator that a run computes on."""

from __future__ import annotations

import ctypes
import sys
import threading
from dataclasses import dataclass
from typing import ClassVar, Protocol

import psutil
import torch

from compress.passes.contract.limits import limits_left

INTERVAL_SECONDS = 0.02
COPIES_SHARE = 4  # one part in so many of the memory that is left is for copies of packed weights; texts need the rest
STORE_BYTES = 4 << 30  # default memory limit of one store of activations; further activations go to files


@dataclass(frozen=True)
class ProblemSize:
    """The size of the model, of one block, or of one linear, that a pass works on.

    Attributes:
        weights: number of weights in dense linears.
        scales: number of scales in quantized linears.
        outside: number of parameters outside of the blocks' linears.
        passed: number of inputs and outputs of all linears, per token; of experts those of the chosen ones.
        vocabulary: vocabulary size; 0 for a block.
        length: tokens of one example: of a calibration sequence, or of a batch for a block.
        itemsize: bytes per number of the dense model.
        packed: number of weights in quantized linears.
        inputs: widths of the tensors that the pass's linears read.
        observed: those whose statistics are in memory at once, if the pass requires `replays`: the widest ones.
        largest: number of weights of the largest linear.
        forward_bytes: bytes of a forward pass of one example through a block.
        states_bytes: bytes of the outputs of a block for the whole calibration text; for the model, of those that are
            not in files.
        outputs: for the model, numbers of the outputs of all blocks, per token.
        hidden: channels of the hidden states between blocks.
        sampled: for a block, numbers of the rows that are sampled from its inputs while they are observed.
        probed: for a block, numbers of the inputs of all its linears in a forward pass of the probe.
        replaced_bytes: for a block, bytes of the linears that the pass leaves, which are not there while it observes.
        shape: (out, in) of the linear; only `weights`, `itemsize` and `shape` are set for one.
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
    observed: tuple[int, ...] = ()
    largest: int = 0
    forward_bytes: int = 0
    states_bytes: int = 0
    outputs: int = 0
    shape: tuple[int, int] = (0, 0)
    hidden: int = 0
    sampled: int = 0
    probed: int = 0
    replaced_bytes: int = 0

    @property
    def links_bytes(self) -> int:
        """Bytes of the search for links: a block in float32, with the inputs of three forward passes of the probe.

        A run with changed channels (`channel_probes`) is compared with another one, while those of the plain run are
        in memory.
        """
        return self.cast_bytes + 3 * 4 * self.probed

    @property
    def beginning_bytes(self) -> int:
        """Bytes of a forward pass or of the search for links, beyond those of the linears that are replaced later."""
        return max(0, max(self.forward_bytes, self.links_bytes) - self.replaced_bytes)

    @property
    def cast_bytes(self) -> int:
        """Bytes of the weights in float32 beside those of a narrower dtype, which a solver holds; 0 for float32."""
        return 4 * self.weights if self.itemsize < 4 else 0

    @classmethod
    def of_linear(cls, shape: tuple[int, int], itemsize: int) -> ProblemSize:
        """Return the size of one linear (out, in)."""
        return cls(shape[0] * shape[1], 0, 0, 0, 0, 0, itemsize, shape=shape)


class DeviceMemory(Protocol):
    """The memory that torch has allocated on an accelerator."""

    def peak_bytes(self) -> int:
        """Return the largest number of allocated bytes since the last `reset`."""
        ...

    def reset(self) -> None:
        """Begin a new peak at the bytes that are allocated now."""
        ...


@dataclass(frozen=True)
class CudaMemory:
    """DeviceMemory of a CUDA device; until it is used, nothing is allocated."""

    device: torch.device

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if torch.cuda.is_initialized() else 0

    def reset(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(self.device)


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return the memory of an accelerator; None for a CPU."""
    return CudaMemory(device) if device.type == "cuda" else None


class PeakMemory:
    """A context manager that measures the resident memory of the process and the allocated memory of an accelerator.

    device: the accelerator's memory, if any. peak_bytes: the largest measured resident memory. The operating system
    decides how many pages of mapped files it includes. device_bytes: the peak of the accelerator, as its allocator
    knows it. Contexts may overlap. One thread measures the process for all of them, so short contexts are cheap.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _open: ClassVar[list[PeakMemory]] = []
    _watching: ClassVar[bool] = False

    def __init__(self, device: DeviceMemory | None = None) -> None:
        self.peak_bytes = self.device_bytes = 0
        self._device = device

    def __enter__(self) -> PeakMemory:
        self.peak_bytes = _resident()
        with self._lock:
            self._share_peak()
            self._open.append(self)
            if not PeakMemory._watching:
                PeakMemory._watching = True
                threading.Thread(target=_watch, name="compress-memory", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = max(self.peak_bytes, _resident())
        with self._lock:
            self._share_peak()
            self._open.remove(self)

    def _share_peak(self) -> None:
        """Give the device's peak to all contexts that are open on it, and begin a new one."""
        if self._device is None:
            return
        peak = self._device.peak_bytes()
        for context in self._open:
            if context._device == self._device:
                context.device_bytes = max(context.device_bytes, peak)
        self._device.reset()


def available_bytes(device: torch.device) -> int:
    """Return bytes that the process can still take without swapping: of the host, or of the device if that is less.

    The limits of the control groups of the process, and of the process itself, count as the host's.
    """
    host = min(psutil.virtual_memory().available, *limits_left())
    return min(host, torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else host


def copies_limit(left_bytes: int) -> int:
    """Return the most memory that copies of packed weights may take, where so much is left."""
    return left_bytes // COPIES_SHARE


def return_freed_memory() -> None:
    """Give freed pages of the heap back to the system, where the C library has a function for it (glibc).

    Small tensors are allocated on the heap. When thousands of temporary ones lie between those that stay, as in a block
    with many experts, their pages are otherwise kept.
    """
    if _TRIM is not None:
        _TRIM(0)


_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
_PROCESS = psutil.Process()


def _resident() -> int:
    return _PROCESS.memory_info().rss


def _watch() -> None:
    """Sample the memory while any context is open; end after a second without one."""
    idle = threading.Event()
    empty = 0.0
    while True:
        idle.wait(INTERVAL_SECONDS)
        resident = _resident()
        with PeakMemory._lock:
            for context in PeakMemory._open:
                context.peak_bytes = max(context.peak_bytes, resident)
            empty = 0.0 if PeakMemory._open else empty + INTERVAL_SECONDS
            if empty > 1:
                PeakMemory._watching = False
                return
