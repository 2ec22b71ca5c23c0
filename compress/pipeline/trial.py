"""Trials: the seconds of a recipe's passes on one block of its model, measured with a few calibration sequences.

A pass is timed by running it, by the engine of `run`, on a model with one block of the recipe's model. The time of most
passes is linear in the number of calibration batches, and in the number of equal steps that some take
(`Pass.repeats`). Two trials give the first slope, a third one the second.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from compress.blockwise.capture import ModelShell
from compress.blockwise.original import needs_original
from compress.data.ids import extent
from compress.errors import ModelError
from compress.evaluation.windows import WindowTask, measure_window
from compress.models.forward import logits_of
from compress.models.kinds.batch import Examples
from compress.models.kinds.kinds import adapter_of, is_headless, objective_of
from compress.models.reshape.reconfigure import build, renumbered, tensors, with_blocks
from compress.models.structure.blocks import Block
from compress.models.structure.ends import vocabulary_size
from compress.passes.contract.journal import Journal
from compress.passes.contract.passes import Pass, Step, calibrates, measured_tokens
from compress.pipeline.engine import Memory, engine
from compress.pipeline.resolve import ResolvedRecipe, run_of, schemes_of, teachers
from compress.pipeline.sources import in_memory

STEPS = 2  # equal steps of a pass in a trial; another trial takes twice as many
PROBE_TOKENS = 16


@dataclass(frozen=True)
class Rate:
    """The seconds of a phase of a run on one block.

    first: with one calibration batch and `STEPS` steps. batch, step: of every further one.
    """

    first: float
    batch: float = 0.0
    step: float = 0.0

    def seconds(self, batches: float, steps: int) -> float:
        """The predicted seconds with so many batches and steps."""
        return max(0.0, self.first + self.batch * (batches - 1) + self.step * (steps - STEPS))


@dataclass(frozen=True)
class Forward:
    """Seconds of a forward pass: of one block, and of the model around the blocks with the loss, for one window."""

    block: float
    around: float

    def seconds(self, blocks: int) -> float:
        """The seconds of a model with so many blocks."""
        return self.block * blocks + self.around


@dataclass(frozen=True)
class Trial:
    """The measured rates of a recipe: of each phase by name, and of a window of both models."""

    rates: dict[str, Rate]
    before: Forward
    after: Forward

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Trial:
        """Read what `to_json` gives.

        Raises:
            KeyError: for a missing value.
            TypeError: for a value of another type.
        """
        if not isinstance(values["rates"], dict):
            raise TypeError("rates must be an object")
        rates = {name: Rate(**rate) for name, rate in values["rates"].items()}
        return cls(rates, Forward(**values["before"]), Forward(**values["after"]))


@dataclass(frozen=True)
class Bench:
    """What trials run on. model: with one block, the one that most passes work on. steps: of that block alone.

    batch, length: sequences of a calibration batch, and their tokens.
    """

    resolved: ResolvedRecipe
    model: PreTrainedModel
    steps: Sequence[Step]
    batch: int
    length: int

    @classmethod
    def of(cls, resolved: ResolvedRecipe) -> Bench:
        """Read the weights of one block. Raises ModelError where a model of one block says nothing about the run."""
        opened, steps = resolved.opened, resolved.steps
        reason = unlike(resolved)
        if reason is not None:
            raise ModelError(reason)
        block = chosen_block(opened.blocks, steps)
        opened.weights.bring(block)
        try:
            names = renumbered(opened.model, [block.index])
            values = tensors(opened.model)
            config = with_blocks(opened.model, [block.index])
            model = build(opened.model, config, {new: values[old] for old, new in names.items()})
            model = copy.deepcopy(model)  # the tensors are those of the opened model
        finally:
            opened.weights.release(block)
        short = {old.rpartition(".")[0]: new.rpartition(".")[0] for old, new in names.items()}
        mine = [(label, step, [short[name] for name in names if name in short]) for label, step, names in steps]
        calibration = resolved.recipe.calibration
        sequences, length = extent(calibration, "calibration", calibration.sequences, calibration.length)
        batch = min(calibration.batch, sequences) if calibrates(steps) else 1
        return cls(resolved, model, [step for step in mine if step[2]], batch, measured_tokens(steps, length))

    def run(self, batches: int, times: int) -> tuple[dict[str, float], PreTrainedModel]:
        """The seconds of every phase with so many batches and `times` * STEPS steps, and the compressed model."""
        model, examples = copy.deepcopy(self.model), random_examples(self.model, batches * self.batch, self.length)
        steps = [(label, shortened(step, times * STEPS), list(names)) for label, step, names in self.steps]
        opened = in_memory(model, self.resolved.opened.tokenizer)
        resolved = replace(self.resolved, opened=opened, form=opened, steps=tuple(steps))
        teacher = teachers([step for _, step, _ in steps], model, None, opened)
        run = run_of(resolved, Journal(), calibration=examples, open_teacher=teacher)
        engine(resolved, examples.batches(self.batch), examples.beginning(PROBE_TOKENS), run, Memory())
        return {name: cost.seconds for name, cost in run.costs.items()}, model


def trial(resolved: ResolvedRecipe, window: int) -> Trial:
    """Measure the rates of a recipe. window: tokens of an evaluation window.

    Raises the errors of its passes, and ModelError where a model of one block says nothing about the run.
    """
    bench = Bench.of(resolved)
    original = forward(bench.model, window)
    base, model = bench.run(1, 1)
    two, _ = bench.run(2, 1)
    more = bench.run(1, 2)[0] if any(repeated(step) for _, step, _ in bench.steps) else base
    rates = {
        name: Rate(seconds, max(0.0, two[name] - seconds), max(0.0, more[name] - seconds) / STEPS)
        for name, seconds in base.items()
        if name in two and name in more
    }
    return Trial(rates, original, forward(model, window))


def forward(model: PreTrainedModel, length: int) -> Forward:
    """Measure the forward pass of a model with one block."""
    opened, window = in_memory(model), random_examples(model, 1, length)[0]
    shell, work = ModelShell(opened), partial(logits_of, model, window)
    if not is_headless(model):
        work = partial(measure_window, model, window, 0, WindowTask(objective_of(model, None)))
    hidden = shell.capture(window).hidden
    work()
    model_seconds = _seconds(work)
    plain = _seconds(lambda: shell.logits(window, shell.capture(window).hidden))
    calls = shell.capture(window).calls
    with torch.no_grad():
        block = _seconds(lambda: calls[0].run(opened.blocks[0].module, hidden))
    return Forward(block, max(model_seconds - block, plain))


def _seconds(work: Any) -> float:
    """Return the least seconds of two calls."""
    times = []
    for _ in range(2):
        begin = perf_counter()
        work()
        times.append(perf_counter() - begin)
    return min(times)


def random_examples(model: PreTrainedModel, count: int, length: int) -> Examples:
    """Random token ids of a vocabulary."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary_size(model), (count, length), generator=generator)
    return adapter_of(model).of_ids(model, ids)


def chosen_block(blocks: Sequence[Block], steps: Sequence[Step]) -> Block:
    """The block with most targeted linears; of equal ones, that nearest to the middle."""
    counts = {
        block.index: sum(name.startswith(f"{block.name}.") for _, _, names in steps for name in names)
        for block in blocks
    }
    return max(blocks, key=lambda block: (counts[block.index], -abs(block.index - len(blocks) // 2)))


def unlike(resolved: ResolvedRecipe) -> str | None:
    """Why a model with one block says nothing about the run, or None."""
    opened, steps = resolved.opened, resolved.steps
    if opened.blocks[-1].stack:
        return "the model has two stacks of blocks"
    if any(scheme.quantized for scheme in schemes_of(opened).values()):
        return "the model is quantized already"
    if needs_original(steps) is not None:
        return "a pass compares with the model before an earlier run"
    if any(isinstance(step.requires.teacher, str) for _, step, _ in steps):
        return "a pass learns from another model"
    if any(step.requires.new_shape for _, step, _ in steps):
        return "a pass changes the shape of the model"
    return None


def repeated(step: Pass) -> int | None:
    """The number of equal steps of a pass, if an option sets it."""
    return None if step.repeats is None else getattr(step, step.repeats)


def shortened(step: Pass, count: int) -> Pass:
    """The pass with `count` equal steps, if it takes any; otherwise the pass."""
    return step if step.repeats is None or repeated(step) is None else step.model_copy(update={step.repeats: count})
