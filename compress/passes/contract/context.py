"""Run: the state of a run that passes and the sweep share; it does not change the result of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from compress.checkpoint.formats.base import Format
from compress.checkpoint.formats.native import Native
from compress.checkpoint.opened import OpenModel
from compress.data.training_text import TrainingText
from compress.layers.parts.codes import CodesPart
from compress.models.kinds.batch import Examples
from compress.models.kinds.causal import CAUSAL
from compress.models.kinds.contract import ModelKind
from compress.numerics.quant.codes import SourceCodes
from compress.numerics.sparse.positions import SparsePolicy
from compress.passes.contract.failures import named_failures
from compress.passes.contract.journal import Journal
from compress.passes.contract.layers import no_codes
from compress.passes.contract.memory import STORE_BYTES, PeakMemory, memory_of, return_freed_memory
from compress.passes.contract.processes import ALONE, Processes
from compress.passes.contract.records import PhaseCost


@dataclass(frozen=True)
class Run:
    """One run of a recipe, as passes and the sweep see it.

    No attribute changes after construction: `at` and `dataclasses.replace` return another value, which shares the
    journal and the records (`costs`, `training`, `ends`).

    Attributes:
        device: the device that computes blocks.
        storage: the dtype of stored dense tensors, and of stored scales unless the format fixes theirs; results are
            rounded to it before later layers are calibrated on them.
        format: the checkpoint format; a solved layer is converted at once to a form that the format can store.
        sparse: the policy for storing only the kept weights, if the format can.
        costs: seconds and peak memory per phase.
        label: the name of the current pass in errors and the journal.
        calibration: the calibration examples, or None.
        stream: the calibration text as streams, from which training with a number of steps reads new sequences; None if
            it is no stream.
        open_teacher: a context manager that opens the uncompressed model, or another one by its source; the model can
            run inside of the context, and each block is in memory only while it runs.
        work: a folder for files that the run needs until it is complete, or None; a restarted run finds the same files.
        lm_objective: the language-model objective, if a pass uses it.
        open_original: opens the model before all passes, those of earlier runs included; for passes that compare blocks
            which an earlier sweep compressed.
        training: the report's record of each training pass, by label.
        ends: the stored forms of embedding and head by name, if the format rounds them.
        processes: those that share the calibration sequences and the solving of layers; a pass over the whole model
            sees all sequences in each of them.
        store_bytes: the memory limit of one store of activations.
        source_codes: returns the codes of a layer, by its full name, in a source that is quantized already, or None.
        importance: `Layer.importance`, of the full name of the layer and its other arguments.
        inputs_at_once: the most input tensors of a block whose statistics are in memory at once, if they are all
            calibrated on the original block; None: those of all layers.
        recomputes: whether a pass with `true_sequential` computes the activations inside of a block again for each
            input, instead of holding those of all batches; passes that compare with the uncompressed model hold them.
        pages_weights: whether weights of a block that are no views of its file, and solved ones, are in files of
            `work`.
        all_experts: whether every expert sees all calibration tokens, instead of those that the router sends to it.
        expert_tokens: an expert with fewer calibration tokens is recorded as a fallback in the journal.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    storage: torch.dtype = torch.float32
    seed: int = 0
    format: Format = field(default_factory=Native)
    sparse: SparsePolicy = "auto"
    journal: Journal = field(default_factory=Journal)
    costs: dict[str, PhaseCost] = field(default_factory=dict)
    label: str = ""
    calibration: Examples | None = None
    stream: TrainingText | None = None
    open_teacher: Callable[[str | None], AbstractContextManager[nn.Module]] | None = None
    open_original: Callable[[], OpenModel] | None = None
    work: Path | None = None
    lm_objective: ModelKind = CAUSAL
    training: dict[str, Any] = field(default_factory=dict)
    ends: dict[str, CodesPart] = field(default_factory=dict)
    processes: Processes = ALONE
    store_bytes: int = STORE_BYTES
    inputs_at_once: int | None = None
    recomputes: bool = False
    pages_weights: bool = False
    all_experts: bool = False
    expert_tokens: int = 0
    source_codes: Callable[[str], SourceCodes | None] = no_codes
    importance: Callable[[str, str, int], Tensor | None] = no_codes

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of stored scales."""
        return self.format.scales_in(self.storage)

    @property
    def weights_folder(self) -> Path | None:
        """The folder for files of weights, or None if they stay in memory."""
        return self.work if self.pages_weights else None

    def at(self, label: str) -> Run:
        """Return the same run with the label of one pass; the journal and the costs are shared."""
        return replace(self, label=label)

    def folder_of_pass(self) -> Path | None:
        """Return the subfolder of the work folder for the current pass."""
        return None if self.work is None else self.work / "".join(c if c.isalnum() else "-" for c in self.label)

    @staticmethod
    def return_memory() -> None:
        """Return freed memory to the system, before steps that allocate tensors of other sizes."""
        return_freed_memory()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time and the peak memory of the context to the phase `name`, and return its freed memory.

        Raises:
            ShortageError or DeviceError: with the name, where the memory or the device fails.
        """
        cost = self.costs.setdefault(name, PhaseCost())
        begin = perf_counter()
        with PeakMemory(memory_of(self.device)) as memory, named_failures(name, self.device):
            try:
                yield
            finally:
                self.return_memory()  # the next phase allocates tensors of other sizes
                cost.seconds += perf_counter() - begin
        cost.peak_bytes = max(cost.peak_bytes, memory.peak_bytes)
        cost.device_bytes = max(cost.device_bytes, memory.device_bytes)
