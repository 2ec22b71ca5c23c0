"""Observe the stages of a block one after the other without batches that wait inside of it.

For each stage, every batch runs again from the input of the block, through the compressed earlier stages. The inputs of
a set of experts are computed once: they are kept in activation stores with their routing, and each stage of an expert
runs only that expert. Rows arrive in the same order and with the same bits as in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from compress.blockwise.lockstep import Arrive, run_in_turn
from compress.blockwise.store import ActivationStore
from compress.models.experts import ROUTED, Experts, computed_by, roles


class _Stored(Exception):  # noqa: N818 - not an error
    """Ends a forward pass whose inputs of the experts are stored."""


def recompute(
    block: nn.Module,
    stages: Sequence[Sequence[str]],
    forwards: Sequence[Callable[[], Tensor]],
    arrive: Arrive,
    solve: Callable[[int], None],
    new_store: Callable[[], ActivationStore],
) -> None:
    """Observe and solve all stages in their order; each is observed on the outputs of the solved earlier ones.

    Args:
        block: the block.
        stages: names in the block of the linears of each stage, in the order of execution.
        forwards: one forward pass per batch.
        arrive: called for every batch that reaches a stage, in the order of the batches.
        solve: called once per stage, after all calls of `arrive` for it.
        new_store: returns an empty activation store.
    """
    inputs: ExpertInputs | None = None
    for stage, names in enumerate(stages):
        arrive_here = lambda _, name, rows, stage=stage: arrive(stage, name, rows)  # noqa: E731
        experts = _experts_of(block, names)
        if experts is None:
            inputs = None
            run_in_turn(block, [names], forwards, arrive_here)
        else:
            if inputs is None or inputs.experts is not experts:
                inputs = ExpertInputs(experts, block, forwards, new_store)
            number = int(names[0].split(".")[-2])
            run_in_turn(block, [names], inputs.forwards_of(number), arrive_here)
        solve(stage)


def _experts_of(block: nn.Module, names: Sequence[str]) -> Experts | None:
    """Return the set of experts that contains all linears of a stage; None if there is none."""
    parents = {name.rpartition(".")[0].rpartition(".")[0] for name in names}
    experts = block.get_submodule(parents.pop()) if len(parents) == 1 else None
    return experts if isinstance(experts, Experts) else None


class ExpertInputs:
    """The inputs of a set of experts for every batch, with the numbers of the chosen experts, in activation stores.

    Attributes:
        experts: the set.
    """

    def __init__(
        self,
        experts: Experts,
        block: nn.Module,
        forwards: Sequence[Callable[[], Tensor]],
        new_store: Callable[[], ActivationStore],
    ) -> None:
        self.experts = experts
        self._tokens, self._chosen = new_store(), new_store()

        def store(reached: Experts, *tensors: Tensor) -> Tensor:
            if reached is not experts:
                return type(reached).forward(reached, *tensors)
            x, chosen, _ = roles(tensors)
            self._tokens.append(x)
            self._chosen.append(chosen.int())
            raise _Stored

        with computed_by(block, store):
            for forward in forwards:
                with suppress(_Stored):
                    forward()

    def forwards_of(self, number: int) -> list[Callable[[], Tensor]]:
        """Return a forward pass through one expert for each batch that has chosen it; for all batches if unrouted."""
        passes: list[Callable[[], Tensor]] = []
        for entry in range(len(self._tokens)):
            chosen = self._chosen[entry]
            token = (chosen == number).nonzero()[:, 0]
            if self.experts.unrouted:
                token = torch.arange(len(chosen), device=chosen.device)
            if len(token):
                passes.append(lambda entry=entry, token=token: self._forward(number, entry, token))
        return passes

    def _forward(self, number: int, entry: int, token: Tensor) -> Tensor:
        ROUTED.set(token)
        return self.experts.expert(number)(self._tokens[entry][token])
