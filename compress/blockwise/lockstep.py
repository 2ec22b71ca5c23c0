"""Observed forward passes over the batches: one after the other, or in lockstep.

In lockstep, every batch runs in its own greenlet and stops at the start of each stage of linears. When no batch can
reach the stage any more, its inputs are observed, it is solved, and the batches continue. A later stage is therefore
calibrated on the output of the compressed earlier stages, the statistics of one stage are in memory at a time, every
batch passes through the block exactly once, and the outputs are those of the compressed block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import greenlet
from torch import Tensor, nn

Arrive = Callable[[int, str, Tensor], None]
"""Called with (stage, name of the linear, rows [tokens, in]) of a batch that has reached a stage."""


class _AllReached(Exception):  # noqa: N818 - not an error
    """Ends a forward pass that has reached all stages."""


def run_in_turn(
    block: nn.Module, stages: Sequence[Sequence[str]], forwards: Sequence[Callable[[], Tensor]], arrive: Arrive
) -> None:
    """Run the forward passes one after the other, each up to its last stage.

    Args:
        block: the block.
        stages: names in the block of the linears of each stage, in the order of execution.
        forwards: one forward pass per batch.
        arrive: called when a batch reaches a stage.
    """
    reached: set[int] = set()

    def hook_for(stage: int, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if stage not in reached:
                reached.add(stage)
                arrive(stage, name, args[0].reshape(-1, args[0].shape[-1]))
            if len(reached) == len(stages):
                raise _AllReached

        return hook

    with _hooks(block, stages, hook_for):
        for forward in forwards:
            reached.clear()
            with suppress(_AllReached):
                forward()


@contextmanager
def _hooks(
    block: nn.Module, stages: Sequence[Sequence[str]], hook_for: Callable[[int, str], Callable[..., None]]
) -> Iterator[None]:
    handles = [
        block.get_submodule(name).register_forward_pre_hook(hook_for(stage, name))
        for stage, names in enumerate(stages)
        for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def lockstep(
    block: nn.Module,
    stages: Sequence[Sequence[str]],
    forwards: Sequence[Callable[[], Tensor]],
    arrive: Arrive,
    solve: Callable[[int], None],
    agree_on_stage: Callable[[int | None], int | None] = lambda stage: stage,
) -> list[Tensor]:
    """Run all forward passes in lockstep and return their outputs in order.

    Args:
        block: the block.
        stages: names in the block of the linears of each stage, in the order of execution.
        forwards: one forward pass per batch.
        arrive: called for every batch that reaches a stage, in the order of the batches, immediately before the stage
            is solved. It runs in the greenlet of the batch.
        solve: called once per stage, after all calls of `arrive` for it. It may change the linears in place. Stages
            that no batch reaches are solved at the end.
        agree_on_stage: maps the first stage at which a batch of this process waits (None for no batch) to the first
            stage at which a batch of any process waits.
    """
    scheduler = greenlet.getcurrent()
    solved_stages: set[int] = set()

    def hook_for(stage: int, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if stage not in solved_stages:
                scheduler.switch(stage)
                arrive(stage, name, args[0].reshape(-1, args[0].shape[-1]))
                scheduler.switch(stage)

        return hook

    outputs: dict[int, Tensor] = {}
    waiting: dict[int, tuple[greenlet.greenlet, int]] = {}

    def advance(index: int, batch: greenlet.greenlet) -> None:
        result = batch.switch()
        waiting.pop(index, None)
        if batch.dead:
            outputs[index] = result
        else:
            waiting[index] = (batch, result)

    with _hooks(block, stages, hook_for):
        try:
            for index, forward in enumerate(forwards):
                advance(index, greenlet.greenlet(forward))
            while (stage := agree_on_stage(min((stage for _, stage in waiting.values()), default=None))) is not None:
                solved_stages.add(stage)  # before `solve`, which may run single linears
                stopped = {index: batch for index, (batch, stopped_stage) in waiting.items() if stopped_stage == stage}
                for _, batch in sorted(stopped.items()):
                    batch.switch()
                solve(stage)
                for index, batch in sorted(stopped.items()):
                    advance(index, batch)
            for stage in sorted(set(range(len(stages))) - solved_stages):
                solved_stages.add(stage)
                solve(stage)
        finally:
            for batch, _ in waiting.values():  # after an error, end the greenlets, whose frames hold activations
                batch.throw()
    return [outputs[index] for index in range(len(forwards))]
