"""Run: what passes and the sweep share about the run they are in; nothing in it changes what a pass computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from compress.api.journal import Journal
from compress.api.memory import PeakMemory
from compress.errors import RecipeError
from compress.formats.base import Format
from compress.formats.native import Native
from compress.model.objective import NEXT_TOKENS, LMObjective
from compress.numerics.sparse.positions import SparsePolicy

DEVICES = r"auto|cpu|cuda(:\d+)?"
"""What can be written as `device`."""


def device_of(name: str) -> torch.device:
    """The device of a recipe; 'auto' is CUDA where there is one.

    Raises RecipeError when this machine has no such device.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(("cuda" if found else "cpu") if name == "auto" else name)
    if device.type == "cuda" and (device.index or 0) >= found:
        known = f"only cuda:0 to cuda:{found - 1}" if found else "no CUDA device that torch can use"
        raise RecipeError(f"device: {name} was asked, but this machine has {known}; write device: auto, or cpu")
    return device


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
    form that it can hold as soon as they are solved. sparse: when kept weights are stored alone, if the format can.
    costs: seconds and peak memory per phase.

    For passes over the whole model: label is what errors and the journal call the pass that is at work. calibration:
    token ids [sequences, length], None where none were given. open_teacher: opens the uncompressed model again, or
    another one by its source, runnable inside of the context; its parts are in memory only while they are needed. work:
    a folder for files that the run needs until it is complete, None where it has none; whoever is killed and started
    again finds it as it was. prediction: what the model is asked for on the text, where a pass looks at that. training:
    what the report says of each pass that trained, by label.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    storage: torch.dtype = torch.float32
    seed: int = 0
    format: Format = field(default_factory=Native)
    sparse: SparsePolicy = "auto"
    journal: Journal = field(default_factory=Journal)
    costs: dict[str, Cost] = field(default_factory=dict)
    label: str = ""
    calibration: Tensor | None = None
    open_teacher: Callable[[str | None], AbstractContextManager[nn.Module]] | None = None
    work: Path | None = None
    lm_objective: LMObjective = NEXT_TOKENS
    training: dict[str, Any] = field(default_factory=dict)

    def at(self, label: str) -> Run:
        """The same run for one of its passes; what is recorded is recorded here."""
        return replace(self, label=label)

    def folder_of_pass(self) -> Path | None:
        """The part of the work folder that belongs to the pass at work."""
        return None if self.work is None else self.work / "".join(c if c.isalnum() else "-" for c in self.label)

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
