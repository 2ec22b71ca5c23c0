"""The state of a sweep, and the context of a pass on one block."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.blockwise.capture import Call, ModelShell, check_hidden, hold
from compress.blockwise.store import ActivationStore
from compress.models.kinds.batch import Batch
from compress.models.paged import Paging, hold_in_file
from compress.models.structure.blocks import Block
from compress.models.structure.links import Group, Link, find_groups
from compress.models.structure.permutations import Permutation
from compress.passes.contract.context import Run
from compress.passes.contract.facts import Log
from compress.passes.contract.memory import return_freed_memory


@dataclass
class SweepState:
    """The state of a sweep between two blocks: the activations of every batch and of the probe.

    Attributes:
        hidden: activations of every batch.
        reference: activations in the uncompressed model, only if a pass needs them.
        calls: calls of the blocks of the present stack, per batch.
        reference_calls: the same calls in the uncompressed model.
        tokens: numbers of tokens that a linear may get, per batch.
        probe: activations of the probe.
        probe_calls: calls of the blocks for the probe.
        stack: index of the present stack.
        links: scale links of the last block with the same `block_signature`.
        permutations: permutation links of the last block with the same `block_signature`.
        unquantized: weights of the block before quantization by full name, only if a pass needs them.
    """

    hidden: ActivationStore
    reference: ActivationStore | None
    calls: list[dict[int, Call]]
    reference_calls: list[dict[int, Call]]
    tokens: list[set[int]]
    probe: Tensor
    probe_calls: dict[int, Call]
    stack: int = 0
    links: dict[Hashable, list[Link]] = field(default_factory=dict)
    permutations: dict[Hashable, list[Permutation]] = field(default_factory=dict)
    unquantized: dict[str, Tensor] | None = None

    def enter(self, block: Block, shell: ModelShell, probe: Batch, batches: Iterable[Batch]) -> None:
        """Enter the stack of a block, whose first inputs depend on the outputs of the previous stack.

        The uncompressed model gets its own outputs of that stack.

        Args:
            block: the block.
            shell: the model around its blocks.
            probe: inputs of the probe.
            batches: inputs of the batches.
        """
        if block.stack == self.stack:
            return
        self.stack = block.stack
        probe_capture = shell.capture(probe, block.stack, self.probe)
        self.probe, self.probe_calls = probe_capture.hidden, probe_capture.calls
        shared_store, reference_store = self.hidden.empty(), self.hidden.empty()
        for i, batch in enumerate(batches):
            captured = shell.capture(batch, block.stack, self.hidden[i])
            self.hidden[i], self.calls[i] = captured.hidden, hold(captured.calls, shared_store)
            self.tokens[i] = {*self.tokens[i], tokens_of(captured.hidden)}
            self.reference_calls[i] = self.calls[i]
            if self.reference is not None:
                captured = shell.capture(batch, block.stack, self.reference[i])
                self.reference[i], self.reference_calls[i] = captured.hidden, hold(captured.calls, reference_store)


def tokens_of(hidden: Float[Tensor, "batch length width"]) -> int:
    """Return the number of tokens of a batch in a stack."""
    return hidden.shape[:-1].numel()


def capture_inputs(
    shell: ModelShell,
    probe: Batch,
    batches: Iterable[Batch],
    store_bytes: int,
    work: Path | None,
    needs_reference: bool = False,
) -> SweepState:
    """Capture the state before the first block.

    Args:
        shell: the model around its blocks.
        probe: inputs of the probe.
        batches: inputs of the batches.
        store_bytes: size limit of the activations in memory.
        work: folder for further activations, or None.
        needs_reference: whether to store reference activations.
    """
    probe_capture = shell.capture(probe)
    reference = ActivationStore(store_bytes, work) if needs_reference else None
    state = SweepState(
        ActivationStore(store_bytes, work), reference, [], [], [], probe_capture.hidden, probe_capture.calls
    )
    for batch in batches:
        batch_capture = shell.capture(batch)
        state.hidden.append(batch_capture.hidden)
        if state.reference is not None:
            state.reference.append(batch_capture.hidden)
        state.calls.append(batch_capture.calls)
        state.reference_calls.append(batch_capture.calls)
        state.tokens.append({tokens_of(batch_capture.hidden)})
    return state


@dataclass(frozen=True)
class BlockContext:
    """One block in a sweep, and the pass that processes it.

    Attributes:
        block: the block.
        state: state of the sweep.
        run: the run.
        dtype: dtype of computation.
        label: label of the pass in the journal.
        store_bytes: size limit of activations in memory.
    """

    block: Block
    state: SweepState
    run: Run
    dtype: torch.dtype
    label: str
    store_bytes: int

    def forwards(self, module: nn.Module, inputs: ActivationStore) -> list[Callable[[], Tensor]]:
        """Return one forward pass per batch, through `module` instead of the block."""
        state, index = self.state, self.block.index
        calls = state.reference_calls if inputs is state.reference else state.calls
        return [lambda i=i: calls[i][index].run(module, inputs[i]) for i in range(len(inputs))]

    def propagate(self) -> None:
        """Replace the activations by the block's outputs."""
        hidden = self.state.hidden
        for i, forward in enumerate(self.forwards(self.block.module, hidden)):
            hidden[i] = self.checked(forward())

    def propagate_probe(self) -> None:
        """Replace the probe's activations by the block's output."""
        self.state.probe = self.state.probe_calls[self.block.index].run(self.block.module, self.state.probe)

    def checked(self, hidden: Tensor) -> Tensor:
        """Check an output of the block, and return it.

        Raises:
            NumericError: if it holds NaN or infinity.
        """
        check_hidden(hidden, self.block)
        return hidden

    def reference_outputs(self, original: nn.Module) -> ActivationStore:
        """Compute the activations of the uncompressed model after the block, with the uncompressed block `original`."""
        assert self.state.reference is not None
        return self.outputs(original, self.state.reference)

    def outputs(self, module: nn.Module, inputs: ActivationStore) -> ActivationStore:
        """Compute the outputs of `module`, in place of the block, for all batches."""
        outputs = ActivationStore(self.store_bytes, self.run.work)
        for forward in self.forwards(module, inputs):
            outputs.append(forward())
        return outputs

    def paging(self) -> Paging:
        """Return what moves solved layers to files, if the run says so."""
        return Paging(self.run.weights_folder)

    def hold_in_file(self, modules: Sequence[nn.Module]) -> None:
        """Hold modules in a file if the run has a folder for it; a model in memory stays there."""
        if self.run.work is not None:
            hold_in_file(modules, self.run.work)
            return_freed_memory()

    def groups(self) -> Sequence[Group]:
        """Find the groups of the block with the probe."""
        call = self.state.probe_calls[self.block.index]
        return find_groups(self.block.module, lambda module: call.run(module, self.state.probe))

    @property
    def unquantized(self) -> dict[str, Tensor] | None:
        """Weights before quantization by full name, only if a pass needs them."""
        return self.state.unquantized

    def full(self, name: str) -> str:
        """Return the full name of a module of the block."""
        return f"{self.block.name}.{name}"

    def logger(self, place: str) -> Log:
        """Return log(kind, message, **figures), which writes to the journal."""

        def log(kind: str, message: str, **figures: Any) -> None:
            self.run.journal.add(kind, f"{self.label} {place}", message, **figures)

        return log
