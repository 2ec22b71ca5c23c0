"""Walk over the original blocks before a sweep changes them, for passes that allocate options over all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from compress.checkpoint.sources.opening import InMemory, OpenModel
from compress.layers.linear import CompressedLinear
from compress.models.experts import in_experts
from compress.models.kinds.recordings import batches, beginning
from compress.models.structure.blocks import Block, find_blocks
from compress.passes.contract.context import Run
from compress.passes.contract.layers import Layer, Surveyed
from compress.passes.contract.observers import Nothing, Observer, without_data
from compress.passes.contract.passes import Survey
from compress.sweep.block_inputs import Inputs
from compress.sweep.capture import ModelShell
from compress.sweep.context import BlockContext, captured

BATCH, PROBE = 4, 64  # sequences of a forward pass, and tokens of the probe, for a model in memory


@dataclass
class SurveyTask:
    """A survey of a pass. names: full names of its layers. found: the collected figures, by layer."""

    label: str
    survey: Survey
    names: Sequence[str]
    found: dict[str, Any]

    def inside(self, block: Block) -> list[str]:
        """The names of its layers inside a block, relative to the block."""
        start = block.name + "."
        return [name.removeprefix(start) for name in self.names if name.startswith(start)]


def run_surveys(
    blocks: Sequence[Block],
    tasks: Sequence[SurveyTask],
    bring: Callable[[Block], nn.Module],
    release: Callable[[Block], None],
    context_of: Callable[[Block, str], BlockContext],
    enter: Callable[[Block, bool], None],
) -> dict[str, dict[str, Any]]:
    """Run all surveys and return their allocations, by label and full name.

    bring, release: load and free a block's weights. context_of(block, label): the context of a block, with a state that
    this walk may change. enter(block, runs): prepares the state for the stack of a block; runs: for all batches.
    """
    runs = any(task.survey.observer is not Nothing for task in tasks)
    for block in blocks:
        enter(block, runs)
        bring(block)
        context = context_of(block, tasks[0].label)
        watched = [(task, Inputs(context, names)) for task in tasks if (names := task.inside(block))]
        with ExitStack() as stack:
            seen = [stack.enter_context(inputs.watching(task.survey.observer)) for task, inputs in watched]
            if runs:
                context.propagate()
        if runs:
            context.propagate_probe()
        for (task, inputs), gathered in zip(watched, seen, strict=True):
            task.found |= task.survey.collect([_surveyed(inputs, name, gathered) for name in inputs.names])
        release(block)
    return {task.label: dict(task.survey.allocate(task.found)) for task in tasks}


def survey_model(model: PreTrainedModel, survey: Survey, names: Sequence[str], run: Run, where: str) -> dict[str, Any]:
    """The allocation of a survey over a model in memory, by full name, for passes over the whole model.

    names: of the linears. where: the label of the pass. The model does not change.
    """
    assert run.calibration is not None
    first = next(model.parameters())
    opened = OpenModel(model, find_blocks(model), InMemory(), None, "", "", first.device, first.dtype)
    ids = run.calibration
    tasks = [SurveyTask(where, survey, names, {})]
    if survey.whole:
        survey.prepare(model, names, batches(ids, BATCH), run)
    shell, texts = ModelShell(opened), (beginning(ids, PROBE), batches(ids, BATCH))
    with torch.no_grad():
        state = captured(shell, *texts, run.store_bytes, run.work)
        found = run_surveys(
            opened.blocks,
            tasks,
            lambda block: block.module,
            lambda block: None,
            lambda block, label: BlockContext(block, state, run, first.dtype, f"{label} survey", run.store_bytes, 0),
            lambda block, runs: state.enter(block, shell, texts[0], texts[1] if runs else ()),
        )
    tell(tasks, found, run)
    return found[where]


def tell(tasks: Sequence[SurveyTask], found: Mapping[str, Mapping[str, Any]], run: Run) -> None:
    """Journal what the surveys say of their allocations."""
    for task in tasks:
        if (note := task.survey.note(found[task.label])) is not None:
            run.journal.add("note", task.label, note)


def _surveyed(inputs: Inputs, name: str, gathered: dict[Any, Observer]) -> Surveyed:
    """A layer and its statistics; the journal is silent here, because the pass reports when it solves."""
    module = CompressedLinear.of(inputs.context.block.module.get_submodule(name))
    seen = next(found for group, found in gathered.items() if name in group.linears)
    if seen.tokens == 0 and not isinstance(seen, Nothing):
        without_data(seen)
    run, signed = inputs.context.run, inputs.context.run.format.negative_scales
    layer = Layer(inputs.context.full(name), module.mask, run.scale_dtype, _silent, negative_scales=signed)
    return Surveyed(layer, module, seen, inputs.rows(name), inputs.context.full(_together(inputs, name)))


def _together(inputs: Inputs, name: str) -> str:
    """The first of the linears that servers compute as one with this one, with '*' for the number of an expert."""
    group = next(group for group in inputs.groups if name in group.linears)
    parent = name.rpartition(".")[0]
    first = next(one for one in group.linears if one.rpartition(".")[0] == parent)
    for expert in in_experts(inputs.context.block.module):
        if first.startswith(f"{expert}."):
            return f"{expert.rpartition('.')[0]}.*{first.removeprefix(expert)}"
    return first


def _silent(*args: Any, **figures: Any) -> None:
    return
