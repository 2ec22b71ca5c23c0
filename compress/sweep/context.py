"""The state of a sweep, and the context of a pass on one block."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compress.models.structure.blocks import Block
from compress.models.structure.links import Group, Link, find_groups
from compress.models.structure.permutations import Permutation
from compress.passes.contract.context import Run
from compress.passes.contract.facts import Log
from compress.sweep.capture import Call, ModelShell, check_hidden, hold
from compress.sweep.store import ActivationStore


@dataclass
class SweepState:
    """The state of a sweep between two blocks: the activations of every batch and of the probe.

    unquantized: weights of the block before they were quantized, by full name, only if a pass needs them.
    reference: the activations in the uncompressed model, only if a pass needs them. calls, reference_calls: of the
    blocks of the present stack, per batch, in the model and in the uncompressed one. tokens: the numbers of tokens that
    a linear may see, per batch. links, permutations: the last ones found, by `block_signature` of the block.
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

    def enter(self, block: Block, shell: ModelShell, probe: Tensor, batches: Iterable[Tensor]) -> None:
        """Before a block: go on to its stack, whose first inputs depend on the outputs of the stack before it.

        probe, batches: token ids. The uncompressed model gets its own outputs of that stack.
        """
        if block.stack == self.stack:
            return
        self.stack = block.stack
        first = shell.capture(probe, block.stack, self.probe)
        self.probe, self.probe_calls = first.hidden, first.calls
        given, of_reference = self.hidden.empty(), self.hidden.empty()
        for i, ids in enumerate(batches):
            found = shell.capture(ids, block.stack, self.hidden[i])
            self.hidden[i], self.calls[i] = found.hidden, hold(found.calls, given)
            self.tokens[i] = {*self.tokens[i], tokens_of(found.hidden)}
            self.reference_calls[i] = self.calls[i]
            if self.reference is not None:
                found = shell.capture(ids, block.stack, self.reference[i])
                self.reference[i], self.reference_calls[i] = found.hidden, hold(found.calls, of_reference)


def tokens_of(hidden: Float[Tensor, "batch length width"]) -> int:
    """The tokens of a batch in a stack."""
    return hidden.shape[:-1].numel()


def captured(
    shell: ModelShell,
    probe: Tensor,
    batches: Iterable[Tensor],
    store_bytes: int,
    work: Path | None,
    compared: bool = False,
) -> SweepState:
    """The state before the first block; batches: token ids. compared: whether to keep reference activations."""
    first = shell.capture(probe)
    reference = ActivationStore(store_bytes, work) if compared else None
    state = SweepState(ActivationStore(store_bytes, work), reference, [], [], [], first.hidden, first.calls)
    for ids in batches:
        found = shell.capture(ids)
        state.hidden.append(found.hidden)
        if state.reference is not None:
            state.reference.append(found.hidden)
        state.calls.append(found.calls)
        state.reference_calls.append(found.calls)
        state.tokens.append({tokens_of(found.hidden)})
    return state


@dataclass(frozen=True)
class BlockContext:
    """One block in a sweep, and the pass that processes it.

    label: of the pass in the journal. dtype: of computation. expert_tokens: an expert with fewer calibration tokens is
    journaled as a fallback.
    """

    block: Block
    state: SweepState
    run: Run
    dtype: torch.dtype
    label: str
    store_bytes: int
    expert_tokens: int

    def forwards(self, module: nn.Module, inputs: ActivationStore) -> list[Callable[[], Tensor]]:
        """One forward pass per batch, through `module` instead of the block."""
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
        """Return an output of the block. Raises NumericError when it holds NaN or infinity."""
        check_hidden(hidden, self.block)
        return hidden

    def reference_outputs(self, original: nn.Module) -> ActivationStore:
        """The uncompressed model's activations after the block; `original`: the uncompressed block."""
        assert self.state.reference is not None
        return self.outputs(original, self.state.reference)

    def outputs(self, module: nn.Module, inputs: ActivationStore) -> ActivationStore:
        """The outputs of `module`, in place of the block, for all batches."""
        found = ActivationStore(self.store_bytes, self.run.work)
        for forward in self.forwards(module, inputs):
            found.append(forward())
        return found

    def groups(self) -> Sequence[Group]:
        """The block's groups, found with the probe."""
        call = self.state.probe_calls[self.block.index]
        return find_groups(self.block.module, lambda module: call.run(module, self.state.probe))

    @property
    def unquantized(self) -> dict[str, Tensor] | None:
        """As of the state."""
        return self.state.unquantized

    def full(self, name: str) -> str:
        """The full name of a module of the block."""
        return f"{self.block.name}.{name}"

    def logger(self, where: str) -> Log:
        """Return log(kind, message, **figures), which writes to the journal."""

        def log(kind: str, message: str, **figures: Any) -> None:
            self.run.journal.add(kind, f"{self.label} {where}", message, **figures)

        return log
