"""The one loop behind `run` and `apply`: a recipe's passes, segment by segment, into a sink.

Consecutive layer and block passes are one segment, a sweep over the blocks; every pass over the whole model is a
segment of its own, and may give the model another shape. The sink says what becomes of finished blocks: `Memory` leaves
them where they are, `checkpoint.Shards` writes them, and takes up a run that was killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from compress.api.context import Run
from compress.api.passes import ModelPass, Step
from compress.model.open.opening import OpenModel
from compress.model.structure.blocks import Block, find_blocks
from compress.pipeline.resolve import follow
from compress.stream.install import LayerResult, round_to_storage
from compress.stream.sweep import Sweep


@dataclass(frozen=True)
class Segment:
    """Number `index` of `count` segments: the passes of one sweep, or one pass over the whole model.

    first: the number of its first pass.
    """

    index: int
    count: int
    first: int
    steps: tuple[Any, ...]

    @property
    def swept(self) -> bool:
        """Whether it is a sweep over the blocks."""
        return not isinstance(self.steps[0][1], ModelPass)

    @property
    def last(self) -> bool:
        """Whether nothing is done to the model after it."""
        return self.index == self.count - 1


class Sink(Protocol):
    """What becomes of blocks that are finished."""

    def start(self, segments: Sequence[Segment]) -> int:
        """Make the model ready for the first segment that is not done yet, and say which one that is."""
        ...

    def restore(self, segment: Segment, block: Block) -> bool:
        """Put in place what the segment has made of a block, if an earlier start of the run has done that."""
        ...

    def done(self, segment: Segment, block: Block, results: list[LayerResult]) -> None:
        """Take a block that the segment has finished, its weights present."""
        ...

    def close(self, segment: Segment, logits: Callable[[], Tensor]) -> None:
        """Take the model as the segment leaves it, all of its blocks done; logits: its output for the probe."""
        ...


class Memory:
    """The sink of `apply`: all stays in memory."""

    def start(self, segments: Sequence[Segment]) -> int:
        """Begin with the first segment."""
        return 0

    def restore(self, segment: Segment, block: Block) -> bool:
        """Restore nothing."""
        return False

    def done(self, segment: Segment, block: Block, results: list[LayerResult]) -> None:
        """Leave the block in the model."""

    def close(self, segment: Segment, logits: Callable[[], Tensor]) -> None:
        """Leave the model as it is."""


def segments(steps: Sequence[Step]) -> list[Segment]:
    """The passes in the parts that they are worked in."""
    apart = groupby(enumerate(steps), lambda item: item[0] if isinstance(item[1][1], ModelPass) else -1)
    parts = [list(group) for _, group in apart]
    return [Segment(i, len(parts), part[0][0], tuple(step for _, step in part)) for i, part in enumerate(parts)]


def engine(
    steps: Sequence[Step], opened: OpenModel, batches: Sequence[Tensor], probe: Tensor, run: Run, sink: Sink
) -> None:
    """Work all passes on the model.

    steps: all passes with the linears that they work on, which change when a pass gives the model another shape.
    batches: calibration ids [batch, length] each. probe: ids [1, length] that go along.
    """
    round_to_storage(opened.model, run)
    parts = segments(steps)
    for segment in parts[sink.start(parts) :]:
        if segment.swept:
            sweep = Sweep(opened, segment.steps, batches, probe, run)
            hidden = sweep(partial(sink.done, segment), partial(sink.restore, segment))
            logits = partial(sweep.shell.logits, probe, hidden)
        else:
            _work_on_whole(segment, steps, opened, run)
            for block in opened.blocks:
                sink.done(segment, block, [])
            logits = partial(_logits, opened, probe)
        sink.close(segment, logits)


def _work_on_whole(segment: Segment, steps: Sequence[Step], opened: OpenModel, run: Run) -> None:
    """Apply a pass over the whole model; later ones find the model as it leaves it."""
    ((where, step, _),) = segment.steps
    with run.phase(where):
        step.apply(opened.model, run.at(where))
        if step.requires.new_shape:
            opened.blocks = find_blocks(opened.model)
            follow(steps, opened, run.format, segment.first + 1)
        round_to_storage(opened.model, run)


def _logits(opened: OpenModel, probe: Tensor) -> Tensor:
    with torch.no_grad():
        return opened.model(input_ids=probe).logits
