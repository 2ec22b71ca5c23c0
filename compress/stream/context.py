"""Where a sweep stands, and what passes at work on one block need to know of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.api.context import Run
from compress.api.facts import Log
from compress.model.structure.blocks import Block
from compress.model.structure.links import Group, Link, find_groups
from compress.model.structure.permutations import Permutation
from compress.stream.capture import Call, ModelShell, check_hidden
from compress.stream.store import ActivationStore


@dataclass
class SweepState:
    """Where the sweep stands between two blocks: the activations of every batch, and those of the probe.

    unquantized: weights of the block before they were quantized, by full name, only where a pass needs them.
    reference: the activations in the uncompressed model, only where a pass needs them. tokens: of every batch. links,
    permutations: those found last, by `make` of the block.
    """

    hidden: ActivationStore
    reference: ActivationStore | None
    calls: list[list[Call]]
    tokens: list[int]
    probe: Tensor
    probe_calls: list[Call]
    links: dict[Hashable, list[Link]] = field(default_factory=dict)
    permutations: dict[Hashable, list[Permutation]] = field(default_factory=dict)
    unquantized: dict[str, Tensor] | None = None


def captured(
    shell: ModelShell, probe: Tensor, batches: Iterable[Tensor], store_bytes: int, work: Path | None,
    compared: bool = False,
) -> SweepState:  # fmt: skip
    """The state before the first block; batches: token ids. compared: with the uncompressed model's activations."""
    first = shell.capture(probe)
    reference = ActivationStore(store_bytes, work) if compared else None
    state = SweepState(ActivationStore(store_bytes, work), reference, [], [], first.hidden, first.calls)
    for ids in batches:
        found = shell.capture(ids)
        state.hidden.append(found.hidden)
        if state.reference is not None:
            state.reference.append(found.hidden)
        state.calls.append(found.calls)
        state.tokens.append(ids.numel())
    return state


@dataclass(frozen=True)
class BlockContext:
    """One block in a sweep, and the pass that is at work on it.

    label: the pass, as the journal calls it. dtype: what the model computes in. expert_tokens: experts calibrated on
    fewer are fallbacks in the journal.
    """

    block: Block
    state: SweepState
    run: Run
    dtype: torch.dtype
    label: str
    store_bytes: int
    expert_tokens: int

    def forwards(self, module: nn.Module, inputs: ActivationStore) -> list[Callable[[], Tensor]]:
        """One forward pass per batch, through `module` in the block's place."""
        calls, index = self.state.calls, self.block.index
        return [lambda i=i: calls[i][index].run(module, inputs[i]) for i in range(len(inputs))]

    def propagate(self) -> None:
        """The activations become the block's outputs."""
        hidden = self.state.hidden
        for i, forward in enumerate(self.forwards(self.block.module, hidden)):
            hidden[i] = self.checked(forward())

    def propagate_probe(self) -> None:
        """The probe's activations become the block's output."""
        self.state.probe = self.state.probe_calls[self.block.index].run(self.block.module, self.state.probe)

    def checked(self, hidden: Tensor) -> Tensor:
        """An output of the block. Raises NumericError when it holds NaN or infinity."""
        check_hidden(hidden, self.block)
        return hidden

    def behind(self, original: nn.Module) -> ActivationStore:
        """The uncompressed model's activations behind the block; `original`: the block as it is there."""
        assert self.state.reference is not None
        return self.outputs(original, self.state.reference)

    def outputs(self, module: nn.Module, inputs: ActivationStore) -> ActivationStore:
        """What `module` makes of all batches in the block's place."""
        found = ActivationStore(self.store_bytes, self.run.work)
        for forward in self.forwards(module, inputs):
            found.append(forward())
        return found

    def groups(self) -> Sequence[Group]:
        """The block's groups, found on the probe."""
        call = self.state.probe_calls[self.block.index]
        return find_groups(self.block.module, lambda module: call.run(module, self.state.probe))

    def full(self, name: str) -> str:
        """The name in the model of a module of the block."""
        return f"{self.block.name}.{name}"

    def logger(self, where: str) -> Log:
        """note(kind, message, **figures) for the journal."""

        def log(kind: str, message: str, **figures: Any) -> None:
            self.run.journal.add(kind, f"{self.label} {where}", message, **figures)

        return log
