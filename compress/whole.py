"""A recipe's passes in turn: sweeps over blocks, and passes over the whole model, which may give it another shape."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from compress.context import Run
from compress.contract import ModelPass, Pass, Step
from compress.errors import ModelError
from compress.footprint import is_sweep
from compress.formats import FORMATS
from compress.model.blocks import find_blocks
from compress.model.open import OpenModel, open_model, read_config
from compress.model.prediction import NEXT_TOKENS, Prediction, prediction_of
from compress.model.vocabulary import check_kind, check_teacher
from compress.plan import Plan, follow, in_form, plan_on
from compress.recipe import Recipe
from compress.reshaping import ReshapingPass


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


def predicted(steps: Sequence[Step], opened: OpenModel, seed: int = 0) -> Prediction:
    """`Run.prediction`; where no pass looks at it, a tokenizer need not say which token is the mask.

    Raises ModelError where it must, and does not; RecipeError for options that say nothing of what is predicted.
    """
    asking = [(where, step) for where, step, _ in steps if isinstance(step, ModelPass) and step.predicts]
    found = prediction_of(opened.model, opened.tokenizer, seed) if asking else NEXT_TOKENS
    for where, step in asking:
        step.asks(found, where)
    return found


def teachers(
    passes: Sequence[Pass], model: PreTrainedModel, teacher: PreTrainedModel | None, opened: OpenModel
) -> Callable[[str | None], AbstractContextManager[nn.Module]]:
    """`Run.open_teacher` of a model in memory; `teacher`, or else a copy, is there where a pass learns from it.

    Raises ModelError for a teacher with another vocabulary, or of another kind.
    """
    asked = {step.other_teacher for step in passes if isinstance(step, ModelPass) and step.needs_teacher}
    for source in asked - {None}:
        check_teacher(str(source), opened, trust_remote_code=False)
    known = copy.deepcopy(model) if teacher is None and None in asked else teacher
    if known is not None:
        check_kind("it", type(known), known.config, opened)
    if known is not None and known.config.vocab_size != model.config.vocab_size:
        sizes = f"it knows {known.config.vocab_size} tokens, the model {model.config.vocab_size}"
        raise ModelError(f"teacher: {sizes}; both need one vocabulary")

    def open_teacher(other: str | None) -> AbstractContextManager[nn.Module]:
        if other is not None:
            return open_model(other, device=opened.device).streaming()
        assert known is not None
        return nullcontext(known.eval())

    return open_teacher


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
