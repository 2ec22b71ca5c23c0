"""The time in which a run waits for the pages of weights, measured where their files are mapped."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor


@dataclass
class Reading:
    """Seconds that a run waited for pages of mapped weights, and the bytes of those weights."""

    seconds: float = 0.0
    size_bytes: int = 0

    def wait_for(self, tensors: Iterable[Tensor]) -> None:
        """Touch every page of mapped tensors, so that no later computation waits for them, and add the time."""
        begin = perf_counter()
        for tensor in tensors:
            if tensor.numel():
                touched = tensor.reshape(-1).view(torch.uint8)
                touched[:: mmap.PAGESIZE].max()
                touched[-1:].max()
                self.size_bytes += tensor.nbytes
        self.seconds += perf_counter() - begin

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add the time in the context, in which a run waits for a thread that reads."""
        begin = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - begin
