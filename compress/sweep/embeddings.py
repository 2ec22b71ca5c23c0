"""Apply the layer passes of a sweep to the ends of the model: the input embedding and the output head.

An embedding, and a head tied to it, are solved before the first block, so that the blocks are calibrated on what it
gives. Its inputs are token ids, so only passes without calibration can solve it. An untied head is solved after the
last block, and its inputs are those that the compressed blocks give.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.sources.opening import OpenModel
from compress.layers.linear import CompressedLinear
from compress.models.structure.ends import End, find_ends, replace_end
from compress.numerics.metrics import relative_error
from compress.passes.contract.context import Run
from compress.passes.contract.facts import Log
from compress.passes.contract.layers import Layer
from compress.passes.contract.observers import Nothing, without_data
from compress.passes.contract.passes import LayerPass, Step
from compress.passes.contract.samples import Sample
from compress.sweep.capture import ModelShell
from compress.sweep.install import LayerResult, install


@dataclass(frozen=True)
class EndContext:
    """A pass on an end. label: of the pass in the journal. dtype: of computation."""

    label: str
    run: Run
    dtype: torch.dtype
    unquantized: dict[str, Tensor] | None = None

    def full(self, name: str) -> str:
        """The full name of a layer, which is its name here."""
        return name

    def logger(self, where: str) -> Log:
        """Return log(kind, message, **figures), which writes to the journal."""

        def log(kind: str, message: str, **figures: Any) -> None:
            self.run.journal.add(kind, f"{self.label} {where}", message, **figures)

        return log


Task = tuple[str, LayerPass, End]
"""(label, pass, end)."""


@dataclass
class EndWork:
    """The passes of a sweep on the ends. first: those before the first block. last: those after the last one."""

    opened: OpenModel
    shell: ModelShell
    steps: Sequence[Step | tuple[str, Any, Sequence[str]]]
    run: Run
    first: list[Task] = field(init=False)
    last: list[Task] = field(init=False)

    def __post_init__(self) -> None:
        ends = find_ends(self.opened.model)
        tasks: list[Task] = []
        for label, step, names in self.steps:
            for end in (end for end in ends if end.name in names):
                assert isinstance(step, LayerPass), "resolve checks this"
                tasks.append((label, step, end))
        self.first = [task for task in tasks if task[2].embedding is not None]
        self.last = [task for task in tasks if task[2].embedding is None]

    def embeddings(self, probe: Tensor) -> list[LayerResult]:
        """Solve the embedding, tied or not. probe: token ids; the error is that of their rows."""
        results = []
        rows = probe.unique()
        for label, step, end in self.first:
            with self.run.phase(label):
                layer = replace_end(self.opened.model, end)
                ids = rows.to(self.opened.device)
                before = layer.rows_at(ids, torch.float32)
                found = self._solve(label, step, end, layer, ())
                results.append(replace(found, error=relative_error(layer.rows_at(ids, torch.float32), before)))
        return results

    def heads(self, batches: Sequence[Tensor], hidden: Iterable[Tensor]) -> list[LayerResult]:
        """Solve an untied head. batches: token ids. hidden: the outputs of the last block for them."""
        results = []
        for label, step, end in self.last:
            with self.run.phase(label):
                layer = replace_end(self.opened.model, end)
                inputs = (self.shell.inputs_of(layer, *each) for each in zip(batches, hidden, strict=True))
                results.append(self._solve(label, step, end, layer, inputs))
        return results

    def _solve(
        self, label: str, step: LayerPass, end: End, layer: CompressedLinear, inputs: Iterable[Tensor]
    ) -> LayerResult:
        """Observe the inputs, and install the solution."""
        own, width = step.for_layer(end.name) or step, layer.shape[1]
        seen, sample, watch = own.observer(width, self.run.device), Sample(), own.watches()
        watched = None if watch is None else watch(width, self.run.device)
        for batch in inputs:
            rows = batch.reshape(-1, width)
            sample.update(rows)
            for observer in (seen, watched):
                if observer is not None:
                    observer.update(layer.transform(rows))
        for gathered in (seen, sample, watched):
            if gathered is not None:
                gathered.merge(self.run.processes)
        if own.observer is not Nothing and seen.tokens == 0:
            without_data(seen)
        context = EndContext(label, self.run, self.opened.dtype)
        absmax = float(layer.weight.abs().max())
        log, signed = context.logger(end.name), self.run.format.negative_scales
        facts = Layer(end.name, layer.mask, self.run.storage, log, watched, absmax, negative_scales=signed)
        return install(context, end.name, layer, sample.rows, lambda weight: own.solve(weight, seen, facts))
