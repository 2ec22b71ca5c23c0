"""Survey the original blocks before a sweep changes them, for passes that allocate options over all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from compress.blockwise.block_inputs import SweepInputs
from compress.blockwise.capture import ModelShell
from compress.blockwise.context import BlockContext, capture_inputs
from compress.checkpoint.opened import OpenModel
from compress.layers.linear import CompressedLinear
from compress.models.experts import in_experts
from compress.models.structure.blocks import Block
from compress.passes.contract.context import Run
from compress.passes.contract.layers import Layer, Surveyed
from compress.passes.contract.observers import Nothing, Observer, without_data
from compress.passes.contract.passes import Survey

BATCH, PROBE = 4, 64  # sequences of a forward pass, and tokens of the probe, for a model in memory


@dataclass
class SurveyTask:
    """A survey of a pass.

    Attributes:
        label: label of the pass.
        survey: the survey.
        names: full names of the layers.
        figures: collected figures by layer.
    """

    label: str
    survey: Survey
    names: Sequence[str]
    figures: dict[str, Any]

    def inside(self, block: Block) -> list[str]:
        """Return the names of the layers inside a block, relative to the block."""
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

    Args:
        blocks: blocks of the model.
        tasks: the surveys.
        bring: loads the weights of a block.
        release: frees the weights of a block.
        context_of: returns the context of a block for a label, with a state that the surveys may change.
        enter: prepares the state for the stack of a block; the second argument tells whether for all batches.
    """
    needs_batches = any(task.survey.observer is not Nothing for task in tasks)
    for block in blocks:
        enter(block, needs_batches)
        bring(block)
        context = context_of(block, tasks[0].label)
        watched_tasks = [(task, SweepInputs(context, names)) for task in tasks if (names := task.inside(block))]
        with ExitStack() as stack:
            observers = [stack.enter_context(inputs.watching(task.survey.observer)) for task, inputs in watched_tasks]
            if needs_batches:
                context.propagate()
        if needs_batches:
            context.propagate_probe()
        for (task, inputs), observer_by_group in zip(watched_tasks, observers, strict=True):
            task.figures |= task.survey.collect([_surveyed(inputs, name, observer_by_group) for name in inputs.names])
        release(block)
    return {task.label: dict(task.survey.allocate(task.figures)) for task in tasks}


def survey_model(model: PreTrainedModel, survey: Survey, names: Sequence[str], run: Run, label: str) -> dict[str, Any]:
    """Return the allocation of a survey over a model in memory by full name, for passes over the whole model.

    The model does not change.

    Args:
        model: the model.
        survey: the survey.
        names: names of the linears.
        run: the run.
        label: label of the pass.
    """
    assert run.calibration is not None
    opened = OpenModel.in_memory(model)
    examples = run.calibration
    tasks = [SurveyTask(label, survey, names, {})]
    if survey.whole:
        survey.prepare(model, names, examples.batches(BATCH), run)
    shell, texts = ModelShell(opened), (examples.beginning(PROBE), examples.batches(BATCH))
    with torch.no_grad():
        state = capture_inputs(shell, *texts, run.store_bytes, run.work)
        allocations = run_surveys(
            opened.blocks,
            tasks,
            lambda block: block.module,
            lambda block: None,
            lambda block, label: BlockContext(block, state, run, opened.dtype, f"{label} survey", run.store_bytes),
            lambda block, runs: state.enter(block, shell, texts[0], texts[1] if runs else ()),
        )
    report_notes(tasks, allocations, run)
    return allocations[label]


def report_notes(tasks: Sequence[SurveyTask], allocations: Mapping[str, Mapping[str, Any]], run: Run) -> None:
    """Add the notes of the surveys about their allocations to the journal."""
    for task in tasks:
        if (note := task.survey.note(allocations[task.label])) is not None:
            run.journal.add("note", task.label, note)


def _surveyed(inputs: SweepInputs, name: str, observer_by_group: dict[Any, Observer]) -> Surveyed:
    """Collect a layer and its statistics. The journal is not used, because the pass reports when it solves."""
    module = CompressedLinear.of(inputs.context.block.module.get_submodule(name))
    observer = next(group_observer for group, group_observer in observer_by_group.items() if name in group.linears)
    if observer.tokens == 0 and not isinstance(observer, Nothing):
        without_data(observer)
    run, signed = inputs.context.run, inputs.context.run.format.negative_scales
    layer = Layer(
        full := inputs.context.full(name),
        module.mask,
        run.scale_dtype,
        _silent,
        negative_scales=signed,
        seed=run.seed,
        importance=partial(run.importance, full),
    )
    stored_bytes = partial(run.format.size_bytes, storage=run.storage)
    joint = inputs.context.full(_joint_name(inputs, name, run.format.alike))
    return Surveyed(layer, module, observer, inputs.rows(name), joint, stored_bytes)


def _joint_name(inputs: SweepInputs, name: str, alike: bool) -> str:
    """Return the first linear that is stored as this one, with '*' for the number of an expert.

    alike: whether those are the linears with the same input, which servers compute together.
    """
    group = next(group for group in inputs.groups if name in group.linears)
    parent = name.rpartition(".")[0]
    joined = (linear for linear in group.linears if linear.rpartition(".")[0] == parent)
    first_linear = next(joined) if alike else name
    for expert in in_experts(inputs.context.block.module):
        if first_linear.startswith(f"{expert}."):
            return f"{expert.rpartition('.')[0]}.*{first_linear.removeprefix(expert)}"
    return first_linear


def _silent(*args: Any, **figures: Any) -> None:
    return
