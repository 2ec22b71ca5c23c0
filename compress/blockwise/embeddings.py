"""Apply the layer passes of a sweep to the embedding and the LM head of the model.

An embedding, and an LM head that is tied to it, are solved before the first block, so that the blocks are calibrated on
its outputs. Its inputs are token ids, so only passes without calibration can solve it. An untied LM head is solved
after the last block, on the outputs of the compressed blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.blockwise.capture import ModelShell
from compress.blockwise.install import install
from compress.checkpoint.opened import OpenModel
from compress.layers.linear import CompressedLinear
from compress.models.kinds.batch import IDS, Batch
from compress.models.structure.ends import End, find_ends, replace_end
from compress.numerics.metrics import relative_error
from compress.passes.contract.context import Run
from compress.passes.contract.facts import Log
from compress.passes.contract.layers import Layer, LayerResult
from compress.passes.contract.observers import Nothing, without_data
from compress.passes.contract.passes import LayerPass, Step
from compress.passes.contract.samples import Sample


@dataclass(frozen=True)
class EmbeddingContext:
    """A pass on an embedding or an LM head.

    Attributes:
        label: label of the pass in the journal.
        run: the run.
        dtype: dtype of computation.
        unquantized: weights before quantization; always None here.
    """

    label: str
    run: Run
    dtype: torch.dtype
    unquantized: dict[str, Tensor] | None = None

    def full(self, name: str) -> str:
        """Return the full name of a layer, which equals its name."""
        return name

    def logger(self, place: str) -> Log:
        """Return log(kind, message, **figures), which writes to the journal."""

        def log(kind: str, message: str, **figures: Any) -> None:
            self.run.journal.add(kind, f"{self.label} {place}", message, **figures)

        return log


EmbeddingTask = tuple[str, LayerPass, End]
"""Label, pass, and embedding or LM head."""


@dataclass
class EmbeddingWork:
    """The passes of a sweep on the embedding and the LM head.

    Attributes:
        opened: the model.
        shell: the model around its blocks.
        steps: passes of the sweep.
        run: the run.
        embedding_tasks: tasks before the first block.
        head_tasks: tasks after the last block.
    """

    opened: OpenModel
    shell: ModelShell
    steps: Sequence[Step | tuple[str, Any, Sequence[str]]]
    run: Run
    embedding_tasks: list[EmbeddingTask] = field(init=False)
    head_tasks: list[EmbeddingTask] = field(init=False)

    def __post_init__(self) -> None:
        ends = find_ends(self.opened.model)
        tasks: list[EmbeddingTask] = []
        for label, step, names in self.steps:
            for end in (end for end in ends if end.name in names):
                assert isinstance(step, LayerPass), "resolve checks this"
                tasks.append((label, step, end))
        self.embedding_tasks = [task for task in tasks if task[2].embedding is not None]
        self.head_tasks = [task for task in tasks if task[2].embedding is None]

    def embeddings(self, probe: Batch) -> list[LayerResult]:
        """Solve the embedding, tied or not.

        Args:
            probe: one sequence; the error is measured on the rows of its tokens.
        """
        results = []
        for label, step, end in self.embedding_tasks:
            with self.run.phase(label):
                layer = replace_end(self.opened.model, end)
                ids = probe.inputs[IDS].unique().to(self.opened.device)
                original_rows = layer.rows_at(ids, torch.float32)
                result = self._solve(label, step, end, layer, ())
                results.append(replace(result, error=relative_error(layer.rows_at(ids, torch.float32), original_rows)))
        return results

    def heads(self, batches: Sequence[Batch], hidden: Iterable[Tensor]) -> list[LayerResult]:
        """Solve an untied LM head.

        Args:
            batches: inputs of the batches.
            hidden: outputs of the last block for the batches.
        """
        results = []
        for label, step, end in self.head_tasks:
            with self.run.phase(label):
                layer = replace_end(self.opened.model, end)
                inputs = (
                    self.shell.inputs_of(layer, *batch_and_hidden)
                    for batch_and_hidden in zip(batches, hidden, strict=True)
                )
                results.append(self._solve(label, step, end, layer, inputs))
        return results

    def _solve(
        self, label: str, step: LayerPass, end: End, layer: CompressedLinear, inputs: Iterable[Tensor]
    ) -> LayerResult:
        """Observe the inputs, solve the layer, and install the solution."""
        layer_step, width = step.for_layer(end.name) or step, layer.shape[1]
        observer, sample = layer_step.observer(width, self.run.device), Sample()
        create_observer = layer_step.requires.layer_observer
        layer_observer = None if create_observer is None else create_observer(width, self.run.device)
        for batch in inputs:
            rows = batch.reshape(-1, width)
            sample.update(rows)
            for statistics in (observer, layer_observer):
                if statistics is not None:
                    statistics.update(layer.transform(rows))
        for statistics in (observer, sample, layer_observer):
            if statistics is not None:
                statistics.merge(self.run.processes)
        if layer_step.observer is not Nothing and observer.tokens == 0:
            without_data(observer)
        context = EmbeddingContext(label, self.run, self.opened.dtype)
        absmax = float(layer.weight.abs().max())
        log, signed, seed = context.logger(end.name), self.run.format.negative_scales, self.run.seed
        importance = partial(self.run.importance, end.name)
        facts = Layer(
            end.name,
            layer.mask,
            self.run.storage,
            log,
            layer_observer,
            absmax,
            negative_scales=signed,
            seed=seed,
            importance=importance,
        )
        return install(context, end.name, layer, sample.rows, lambda weight: layer_step.solve(weight, observer, facts))
