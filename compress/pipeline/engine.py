"""The engine of `run` and `apply`: it applies a recipe's passes, segment by segment, and passes results to a sink.

Consecutive layer and block passes form one segment, a sweep over the blocks. Each pass over the whole model is a
segment of its own, and may change the shape of the model. A sink receives finished blocks: `Memory` keeps them in
memory, `checkpoint.Shards` writes them to files and resumes a run that was killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Protocol

from torch import Tensor

from compress.blockwise.install import absorb_transforms
from compress.blockwise.storage import round_to_storage
from compress.blockwise.sweep import Sweep
from compress.checkpoint.opened import OpenModel
from compress.kernels.dispatch import plain_torch
from compress.models.forward import logits_of
from compress.models.kinds.batch import Batch
from compress.models.structure.blocks import Block, find_blocks
from compress.passes.contract.context import Run
from compress.passes.contract.passes import ModelPass, Step
from compress.passes.contract.processes import ALONE
from compress.passes.contract.records import LayerResult
from compress.pipeline.resolve import ResolvedRecipe, update_targets


@dataclass(frozen=True)
class Segment:
    """Segment `index` of `count`: the passes of one sweep, or one pass over the whole model.

    first_step: the number of its first pass in the recipe.
    """

    index: int
    count: int
    first_step: int
    steps: tuple[Any, ...]

    @property
    def swept(self) -> bool:
        """Whether the segment is a sweep over the blocks."""
        return not isinstance(self.steps[0][1], ModelPass)

    @property
    def last(self) -> bool:
        """Whether no segment follows."""
        return self.index == self.count - 1


class Sink(Protocol):
    """A receiver of finished blocks."""

    def start(self, segments: Sequence[Segment]) -> int:
        """Prepare the model for the first unfinished segment and return the number of that segment."""
        ...

    def restore(self, segment: Segment, block: Block) -> bool:
        """Restore a block that an earlier start of the run has finished in this segment; False if there is none."""
        ...

    def done(self, segment: Segment, block: Block, results: list[LayerResult]) -> None:
        """Receive a block that the segment has finished; its weights are in memory."""
        ...

    def close(self, segment: Segment, logits: Callable[[], Tensor], ends: list[LayerResult]) -> None:
        """Receive the model after the segment, with all blocks finished.

        logits: computes its output for the probe. ends: the results of the input embedding and the output head.
        """
        ...


class Memory:
    """The sink of `apply`: the model stays in memory."""

    def start(self, segments: Sequence[Segment]) -> int:
        """Start at the first segment."""
        return 0

    def restore(self, segment: Segment, block: Block) -> bool:
        """Restore nothing."""
        return False

    def done(self, segment: Segment, block: Block, results: list[LayerResult]) -> None:
        """Leave the block in the model."""

    def close(self, segment: Segment, logits: Callable[[], Tensor], ends: list[LayerResult]) -> None:
        """Do nothing."""


def segments(steps: Sequence[Step]) -> list[Segment]:
    """Split the passes into segments."""
    apart = groupby(enumerate(steps), lambda item: item[0] if isinstance(item[1][1], ModelPass) else -1)
    parts = [list(group) for _, group in apart]
    return [Segment(i, len(parts), part[0][0], tuple(step for _, step in part)) for i, part in enumerate(parts)]


@plain_torch()
def engine(resolved: ResolvedRecipe, batches: Sequence[Batch], probe: Batch, run: Run, sink: Sink) -> None:
    """Apply all passes to the model.

    batches: calibration batches. probe: a sequence that runs with the batches.
    """
    steps, opened = resolved.steps, resolved.opened
    round_to_storage(opened.model, run)
    parts = segments(steps)
    for segment in parts[sink.start(parts) :]:
        ends: list[LayerResult] = []
        if segment.swept:
            sweep = Sweep(opened, segment.steps, batches, probe, run, run.store_bytes, is_last_segment=segment.last)
            hidden = sweep(partial(sink.done, segment), partial(sink.restore, segment))
            logits, ends = partial(sweep.shell.logits, probe, hidden), sweep.ends
        else:
            _apply_model_pass(segment, steps, opened, run)
            for block in opened.blocks:
                absorb_transforms(block, run, segment.last)
                sink.done(segment, block, [])
            logits = partial(logits_of, opened.model, probe)
        sink.close(segment, logits, ends)


def _apply_model_pass(segment: Segment, steps: Sequence[Step], opened: OpenModel, run: Run) -> None:
    """Apply a pass over the whole model; after a change of shape, update the linears of later passes."""
    ((label, step, _),) = segment.steps
    with run.phase(label):
        step.apply(opened.model, replace(run.at(label), processes=ALONE))  # training divides its steps by itself
        if step.requires.new_shape:
            opened.blocks = find_blocks(opened.model)
            update_targets(steps, opened, run.format, segment.first_step + 1)
        round_to_storage(opened.model, run)
