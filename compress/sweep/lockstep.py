"""Observed forward passes over the batches: one after the other, or in lockstep.

In lockstep, every batch runs in its own greenlet and stops at the start of each stage of linears. The batches continue
when the stage is solved. A later stage is therefore calibrated on the output of the compressed earlier stages, every
batch passes through the block exactly once, and the outputs are those of the compressed block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import greenlet
from torch import Tensor, nn

Arrive = Callable[[int, str, Tensor], None]
"""arrive(stage, name of the linear, rows [tokens, in]): called when a batch reaches a stage."""


class _Done(Exception):  # noqa: N818 - not an error
    """All stages are reached."""


def in_turn(
    block: nn.Module, stages: Sequence[Sequence[str]], forwards: Sequence[Callable[[], Tensor]], arrive: Arrive
) -> None:
    """Run the forward passes one after the other, each up to its last stage; arguments as in `lockstep`."""
    reached: set[int] = set()

    def hook_for(stage: int, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if stage not in reached:
                reached.add(stage)
                arrive(stage, name, args[0].reshape(-1, args[0].shape[-1]))
            if len(reached) == len(stages):
                raise _Done

        return hook

    with _hooks(block, stages, hook_for):
        for forward in forwards:
            reached.clear()
            with suppress(_Done):
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
    agreed: Callable[[int | None], int | None] = lambda stage: stage,
) -> list[Tensor]:
    """Run all forward passes in lockstep and return their outputs in order.

    stages: names (inside the block) of the linears of each stage, in the order of execution. forwards: one per batch.
    solve(stage): called once per stage, after every batch that reaches the stage has arrived; it may change the linears
    in place. Stages that no batch reaches are solved at the end. agreed(stage): the first stage that a batch of any
    process waits at, from that of this process's batches (None: no batch waits).
    """
    scheduler = greenlet.getcurrent()
    done: set[int] = set()

    def hook_for(stage: int, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if stage not in done:
                arrive(stage, name, args[0].reshape(-1, args[0].shape[-1]))
                scheduler.switch(stage)

        return hook

    outputs: dict[int, Tensor] = {}
    waiting: dict[int, tuple[greenlet.greenlet, int]] = {}

    def advance(index: int, batch: greenlet.greenlet) -> None:
        result = batch.switch()
        if batch.dead:
            waiting.pop(index, None)
            outputs[index] = result
        else:
            waiting[index] = (batch, result)

    with _hooks(block, stages, hook_for):
        try:
            for index, forward in enumerate(forwards):
                advance(index, greenlet.greenlet(forward))
            while (stage := agreed(min((stage for _, stage in waiting.values()), default=None))) is not None:
                done.add(stage)  # before solving: forward passes of single linears are no arrivals
                solve(stage)
                for index, (batch, at) in sorted(waiting.items()):
                    if at == stage:
                        advance(index, batch)
            for stage in sorted(set(range(len(stages))) - done):
                done.add(stage)
                solve(stage)
        finally:
            for batch, _ in waiting.values():  # after an error: end the greenlets, whose frames hold activations
                batch.throw()
    return [outputs[index] for index in range(len(forwards))]
