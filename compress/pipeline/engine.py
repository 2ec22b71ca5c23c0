"""A recipe's passes in turn: sweeps over blocks, and passes over the whole model, which may give it another shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from compress.api.context import Run
from compress.api.passes import ModelPass, Step
from compress.families.reshaping import ReshapingPass
from compress.formats import FORMATS
from compress.model.open.opening import OpenModel, read_config
from compress.model.structure.blocks import find_blocks
from compress.pipeline.footprint import is_sweep
from compress.pipeline.plan import Plan, plan_on
from compress.pipeline.resolve import follow, in_form
from compress.recipe.schema import Recipe


def segments(steps: Sequence[Step]) -> list[tuple[bool, list[Any]]]:
    """Consecutive layer and block passes together, each run of model passes together; True for the former."""
    return [(swept, list(group)) for swept, group in groupby(steps, lambda step: is_sweep(step[1]))]


def work_on_whole(steps: Sequence[Step], where: str, opened: OpenModel, context: Run) -> None:
    """Apply the model pass labelled `where`; passes behind it find the model as it leaves it."""
    (index,) = (i for i, (label, _, _) in enumerate(steps) if label == where)
    step = steps[index][1]
    assert isinstance(step, ModelPass)
    step.apply(opened.model, context.at(where))
    if isinstance(step, ReshapingPass):
        opened.blocks = find_blocks(opened.model)
        follow(steps, opened, context.format, index + 1)


def ended(
    recipe: Recipe, steps: Sequence[Step], opened: OpenModel, planned: Plan, folder: Path
) -> tuple[OpenModel, Plan]:
    """The model, and the plan of its layers, in the shape that the checkpoint in `folder` describes.

    Both are as they came where no pass gives the model another shape.
    """
    last = max((i for i, (_, step, _) in enumerate(steps) if isinstance(step, ReshapingPass)), default=None)
    if last is None:
        return opened, planned
    config = read_config(folder, str(folder), recipe.trust_remote_code)
    vars(config).pop("quantization_config", None)
    form = in_form(opened, config)
    follow(steps, form, FORMATS[recipe.save.format], last + 1)
    found = plan_on(recipe, steps, form)
    return form, replace(found, dense_bytes=planned.dense_bytes, memory_bytes=planned.memory_bytes)
