"""Run: what passes and the sweep share about the run they are in; nothing in it changes what a pass computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch

from compress.formats.base import Format
from compress.formats.native import Native
from compress.journal import Journal
from compress.memory import PeakMemory


@dataclass
class Cost:
    """Time and peak memory of a phase, added up over its parts."""

    seconds: float = 0.0
    peak_bytes: int = 0


@dataclass
class Run:
    """One run of a recipe.

    device: where blocks are computed. storage: the dtype in which scales and dense tensors will be stored; computed
    values are rounded to it before anything is calibrated on them. format: how layers will be stored; they take the
    form that it can hold as soon as they are solved. costs: seconds and peak memory per phase.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    storage: torch.dtype = torch.float32
    seed: int = 0
    format: Format = field(default_factory=Native)
    journal: Journal = field(default_factory=Journal)
    costs: dict[str, Cost] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time and the peak memory of what is done inside under a name."""
        cost = self.costs.setdefault(name, Cost())
        begin = perf_counter()
        with PeakMemory() as memory:
            try:
                yield
            finally:
                cost.seconds += perf_counter() - begin
        cost.peak_bytes = max(cost.peak_bytes, memory.peak_bytes)
