"""A walk over the blocks as they came, before a sweep changes them: for passes that decide over all layers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from compress.api.observers import Nothing, Observer, without_data
from compress.api.passes import Layer, Survey, Surveyed
from compress.model.linear import CompressedLinear
from compress.model.structure.blocks import Block
from compress.stream.block_inputs import Inputs
from compress.stream.context import BlockContext


@dataclass
class Asked:
    """A survey that a pass asked for. names: full names of its layers. found: what it remembers of those seen."""

    label: str
    survey: Survey
    names: Sequence[str]
    found: dict[str, Any]

    def inside(self, block: Block) -> list[str]:
        """The names of its layers inside a block."""
        start = block.name + "."
        return [name.removeprefix(start) for name in self.names if name.startswith(start)]


def look_over(
    blocks: Sequence[Block],
    asked: Sequence[Asked],
    bring: Callable[[Block], nn.Module],
    release: Callable[[Block], None],
    context_of: Callable[[Block, str], BlockContext],
) -> dict[str, dict[str, Any]]:
    """What every survey decides for every layer, by label and full name.

    bring, release: a block's weights. site_of(block, label): the block, in a state of which the walk may dispose.
    """
    runs = any(one.survey.observer is not Nothing for one in asked)
    for block in blocks:
        bring(block)
        context = context_of(block, asked[0].label)
        watched = [(one, Inputs(context, names)) for one in asked if (names := one.inside(block))]
        with ExitStack() as stack:
            seen = [stack.enter_context(inputs.watching(one.survey.observer)) for one, inputs in watched]
            if runs:
                context.propagate()
        if runs:
            context.propagate_probe()
        for (one, inputs), gathered in zip(watched, seen, strict=True):
            one.found |= one.survey.collect([_surveyed(inputs, name, gathered) for name in inputs.names])
        release(block)
    return {one.label: dict(one.survey.allocate(one.found)) for one in asked}


def _surveyed(inputs: Inputs, name: str, gathered: dict[Any, Observer]) -> Surveyed:
    """A layer and what reached it; notes are left to the pass, when it solves."""
    module = CompressedLinear.of(inputs.context.block.module.get_submodule(name))
    seen = next(found for group, found in gathered.items() if name in group.linears)
    if seen.tokens == 0 and not isinstance(seen, Nothing):
        without_data(seen)
    layer = Layer(inputs.context.full(name), module.mask, inputs.context.run.storage, _silent)
    return Surveyed(layer, module, seen, inputs.rows(name))


def _silent(*args: Any, **figures: Any) -> None:
    return
