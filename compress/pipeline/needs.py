"""Check the teachers and the objectives of a recipe before the run."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from compress.api.passes import ModelPass, Step
from compress.errors import ModelError
from compress.model.objective import LMObjective, objective_of
from compress.model.open.opening import OpenModel
from compress.model.open.vocabulary import check_teacher
from compress.pipeline.resolve import lm_objective_for, with_config
from compress.pipeline.sources import original_of
from compress.recipe.schema import Recipe


def check_needs(recipe: Recipe, steps: Sequence[Step], opened: OpenModel) -> LMObjective:
    """Check teachers and objectives; no weights are read. Returns `Run.lm_objective`.

    Raises ModelError for a teacher that does not fit or a missing mask token; RecipeError for options that have no
    effect on the objective.
    """
    check_teachers(recipe, steps, opened)
    found = lm_objective_for(steps, opened, recipe.seed)
    if recipe.eval is not None and recipe.eval.perplexity:
        objective_of(opened.model, opened.tokenizer)  # an evaluation needs the mask token, too
    return found


def check_teachers(recipe: Recipe, steps: Sequence[Step], opened: OpenModel) -> None:
    """Compare each teacher with the model in the shape that it has before the pass."""
    form = opened
    last = max((i for i, (_, step, _) in enumerate(steps) if step.requires.teacher), default=-1)
    for where, step, _ in steps[: last + 1]:
        source, teacher = step.requires.teacher, opened.model
        if isinstance(source, str):
            teacher = check_teacher(source, opened, recipe.trust_remote_code)
        elif source and (original := original_of(recipe.model)) != recipe.model:
            teacher = _original(original, recipe, opened, where)
        if not isinstance(step, ModelPass):
            continue
        if source:
            step.check_teacher(form.model, teacher, where)
        if step.requires.new_shape:
            form = with_config(form, step.outcome(form.model, where))


def _original(source: str, recipe: Recipe, opened: OpenModel, where: str) -> PreTrainedModel:
    """The uncompressed model of a recipe that starts with a compressed one, without weights."""
    try:
        return check_teacher(source, opened, recipe.trust_remote_code)
    except ModelError as error:
        raise ModelError(
            f"{where}: the uncompressed model of {recipe.model} is {source} by its recipe.yaml, which cannot be its "
            f"teacher ({error}); name another one (teacher: ...)"
        ) from error
