"""The sweep: apply several passes block by block, with the weights of one block in memory.

Each pass of a block gets one forward pass over all calibration inputs. The outputs of the compressed block are the
inputs of the next block. Layer passes run in lockstep: each layer is calibrated on the output of the compressed layers
before it in the same block.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.blockwise.block_inputs import SweepInputs
from compress.blockwise.capture import ModelShell, check_hidden
from compress.blockwise.context import BlockContext, SweepState, capture_inputs
from compress.blockwise.embeddings import EmbeddingWork
from compress.blockwise.install import (
    absorb_transforms,
    check_equal_in_processes,
    keep_worst_histograms,
)
from compress.blockwise.layers import LayerWork
from compress.blockwise.original import check_same_stream, needs_original
from compress.blockwise.reference import twin
from compress.blockwise.storage import round_to_storage
from compress.blockwise.store import ActivationStore
from compress.blockwise.survey import SurveyTask, report_notes, run_surveys
from compress.checkpoint.opened import OpenModel
from compress.layers.linear import linears
from compress.models.experts import unroute
from compress.models.kinds.batch import Batch
from compress.models.structure.blocks import Block
from compress.models.structure.ends import compressed_ends
from compress.passes.contract.context import Run
from compress.passes.contract.layers import LayerResult
from compress.passes.contract.memory import STORE_BYTES
from compress.passes.contract.passes import BlockPass, LayerPass

BlockDone = Callable[[Block, list[LayerResult]], None]
"""Called with each finished block and its results while its weights are in memory."""

Restore = Callable[[Block], bool]
"""Restore the compressed weights of a finished block; False if there are none."""


@dataclass
class Sweep:
    """One sweep of layer and block passes over the blocks of a model.

    Attributes:
        opened: the model.
        steps: label, pass and full names of its linears, in order.
        batches: calibration batches of this process; may be empty if no pass needs data.
        probe: one sequence that runs with the batches, for proofs and the final comparison.
        run: the run.
        store_bytes: size limit of activations in memory.
        is_last_segment: whether no segment follows.
        shell: the model around its blocks.
        allocated: results of the surveys, by label and full name of the layer.
        ends: results of the embedding and the LM head.
        original: the model before all passes, if a pass compares blocks that were compressed before the sweep.
    """

    opened: OpenModel
    steps: Sequence[tuple[str, LayerPass | BlockPass, Sequence[str]]]
    batches: Sequence[Batch]
    probe: Batch
    run: Run
    store_bytes: int = STORE_BYTES
    is_last_segment: bool = True
    shell: ModelShell = field(init=False)
    allocated: dict[str, dict[str, Any]] = field(init=False, default_factory=dict)
    ends: list[LayerResult] = field(init=False, default_factory=list)
    original: OpenModel | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.shell = ModelShell(self.opened, self._load)
        if needs_original(self.steps) is not None:
            assert self.run.open_original is not None
            self.original = self.run.open_original()

    def __call__(self, finish_block: BlockDone, restore: Restore) -> Tensor:
        """Process all blocks.

        Args:
            finish_block: called with each finished block.
            restore: restores a block that is already compressed.

        Returns:
            The output of the last block for the probe.
        """
        with torch.no_grad():
            with self.run.phase("capture"):
                needs_reference = any(step.requires.reference for _, step, _ in self.steps)
                capture = partial(capture_inputs, self.shell, self.probe, self.batches, self.store_bytes, self.run.work)
                ends = EmbeddingWork(self.opened, self.shell, self.steps, self.run)
                original_reference = (
                    capture(True).reference if needs_reference and ends.embedding_tasks else None
                )  # with the original embedding
                self.ends += ends.embeddings(self.probe)
                state = capture(needs_reference)
                state.reference = original_reference or state.reference
            if any(step.requires.unquantized for _, step, _ in self.steps):
                state.unquantized = {}
            if self.original is not None:
                check_same_stream(state, ModelShell(self.original).capture(self.probe), self.original.source)
            self._survey(state)
            for block in self.opened.blocks:
                self._enter(block, state)
                original = None if state.reference is None else twin(self._uncompressed(block))
                if restore(block):
                    with self.run.phase("restore"):
                        context = self._context(block, state, "restored")
                        context.propagate()
                        if original is not None:
                            state.reference = context.reference_outputs(original)
                else:
                    self._bring(block)
                    results = self._work(block, state)
                    check_equal_in_processes(block.module, block.name, self.run.processes)
                    finish_block(block, keep_worst_histograms(results))
                state.probe = state.probe_calls[block.index].run(block.module, state.probe)
                check_hidden(state.probe, block)
                self.opened.weights.release(block)
                if self.original is not None:
                    self.original.weights.release(self.original.blocks[block.index])
            self.ends += ends.heads(self.batches, state.hidden)
            for layer in compressed_ends(self.opened.model).values():
                check_equal_in_processes(layer, "the embedding or the head", self.run.processes)
        return state.probe

    def _survey(self, state: SweepState) -> None:
        """Run the surveys of all passes before the first layer is solved; the model does not change."""
        surveys = [(label, step.survey(), names) for label, step, names in self.steps]
        tasks = [SurveyTask(label, survey, names, {}) for label, survey, names in surveys if survey is not None]
        if not tasks:
            return
        survey_state = replace(
            state,
            hidden=ActivationStore(self.store_bytes, self.run.work),
            reference=None,
            calls=list(state.calls),
            reference_calls=list(state.calls),
        )
        for hidden in state.hidden:
            survey_state.hidden.append(hidden)
        with self.run.phase("survey"):
            self._prepare_whole_model_surveys(tasks)
            self.allocated = run_surveys(
                self.opened.blocks,
                tasks,
                self._bring,
                self.opened.weights.release,
                lambda block, label: self._context(block, survey_state, f"{label} survey"),
                lambda block, runs: self._enter(block, survey_state, runs),
            )
        report_notes(tasks, self.allocated, self.run)
        survey_of = {task.label: task.survey for task in tasks}
        self.steps = [
            (label, survey_of[label].settled(step, self.allocated[label]) if label in survey_of else step, names)
            for label, step, names in self.steps
        ]

    def _prepare_whole_model_surveys(self, tasks: Sequence[SurveyTask]) -> None:
        """Prepare the surveys that need the whole model, with the weights of all blocks in memory."""
        whole_model_tasks = [task for task in tasks if task.survey.whole]
        if not whole_model_tasks:
            return
        for block in self.opened.blocks:
            self._load(block)
        for task in whole_model_tasks:
            task.survey.prepare(self.opened.model, task.names, self.batches, self.run.at(task.label))
        for block in self.opened.blocks:
            self.opened.weights.release(block)

    def _enter(self, block: Block, state: SweepState, needs_batches: bool = True) -> None:
        """Capture the inputs of a later stack before its first block, for the probe and, if needed, for all batches."""
        if block.stack != state.stack:
            with self.run.phase("capture"):
                state.enter(block, self.shell, self.probe, self.batches if needs_batches else ())

    def _load(self, block: Block) -> None:
        """Load the weights of a block, rounded to the storage dtype."""
        self.opened.weights.bring(block)
        round_to_storage(block.module, self.run, self.run.weights_folder)

    def _bring(self, block: Block) -> nn.Module:
        """Load the weights of a block, rounded to the storage dtype, and prefetch the next block."""
        self.opened.bring(block)
        round_to_storage(block.module, self.run, self.run.weights_folder)
        return block.module

    def _uncompressed(self, block: Block) -> nn.Module:
        """Load the block of the model before all passes, or before this sweep."""
        if self.original is None:
            return self._bring(block)
        original_block = self.original.blocks[block.index]
        self.original.bring(original_block)
        round_to_storage(original_block.module, self.run)
        return original_block.module

    def _work(self, block: Block, state: SweepState) -> list[LayerResult]:
        """Apply every pass to one block; its outputs become the hidden states of the sweep."""
        results: list[LayerResult] = []
        has_outputs = False  # whether state.hidden already holds this block's outputs
        reference: ActivationStore | None = None  # the uncompressed model's activations after this block
        original: ActivationStore | None = None  # the outputs of the original block for the same inputs
        uncompressed = block.module if self.original is None else self._uncompressed(block)
        if self.run.all_experts:
            unroute(block.module)
        for label, step, names in self.steps:
            names_in_block = [
                name.removeprefix(block.name + ".") for name in names if name.startswith(block.name + ".")
            ]
            if not names_in_block:
                continue
            context = self._context(block, state, label)
            with self.run.phase(label), self.run.journal.one_per_block(label, block.name, names_in_block):
                uses_reference = isinstance(step, LayerPass) and step.requires.reference
                if state.reference is not None and reference is None and not uses_reference:
                    reference = context.reference_outputs(uncompressed)  # before the block changes
                if original is None and self._compares(block):
                    original = context.outputs(uncompressed, state.hidden)
                is_last = (label, step, names) == self.steps[-1]
                if isinstance(step, BlockPass):
                    results += self._block_pass(context, step, names_in_block, reference, original)
                else:
                    work = LayerWork(context, step, names_in_block, self.allocated.get(label))
                    results += work(is_last)
                    has_outputs = is_last
                    reference = work.reference_outputs if reference is None else reference
        unroute(block.module, False)
        if state.unquantized:
            state.unquantized.clear()
        has_outputs &= not absorb_transforms(block, self.run, self.is_last_segment)
        context = self._context(block, state, "propagate", reports_progress=False)
        if state.reference is not None:
            state.reference = context.reference_outputs(block.module) if reference is None else reference
        if not has_outputs:
            with self.run.phase("propagate"):
                context.propagate()
        return results

    def _compares(self, block: Block) -> bool:
        """Return whether a pass compares the block with the original block."""
        block_steps = [s for _, s, names in self.steps if any(name.startswith(block.name + ".") for name in names)]
        return any(step.requires.original for step in block_steps)

    def _block_pass(
        self,
        context: BlockContext,
        step: BlockPass,
        names: list[str],
        reference: ActivationStore | None,
        original: ActivationStore | None,
    ) -> list[LayerResult]:
        inputs = SweepInputs(context, names, reference, original)
        inputs.check(step)
        step.solve_block(context.block.module, inputs, context.logger(context.block.name))
        round_to_storage(context.block.module, self.run)
        if self.run.pages_weights:
            context.hold_in_file(list(linears(context.block.module).values()))
        if inputs.work is not None:
            shutil.rmtree(inputs.work, ignore_errors=True)
        return inputs.results

    def _context(self, block: Block, state: SweepState, label: str, reports_progress: bool = True) -> BlockContext:
        """Return the context of a block for the pass `label`.

        Args:
            block: the block.
            state: state of the sweep.
            label: label of the pass.
            reports_progress: whether to add progress to the journal.
        """
        if reports_progress:
            blocks = len(self.opened.blocks)
            self.run.journal.add("progress", label, block.name, block=block.index, blocks=blocks, step=label)
        return BlockContext(block, state, self.run, self.opened.dtype, label, self.store_bytes)
