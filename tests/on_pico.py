"""Recipes as they are written, made to run on the pico model in seconds: shared by the tests and by the baselines."""

from __future__ import annotations

from pathlib import Path

from mixtures import mixture_folder

from compress import Calibration, Evaluate, Recipe
from compress.errors import TargetError
from compress.pipeline.plan import plan

ROOT = Path(__file__).parents[1]
PICO = Path(__file__).parent / "pico" / "model"
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

CALIBRATION = Calibration(source="embedded", sequences=8, length=64)
MEASURED = Evaluate(perplexity=("embedded",), windows=16, length=128)
FITTING_GROUP = 32  # divides 64, 128 and 288, the widths of the pico model


def on_pico(recipe: Recipe) -> Recipe:
    """The recipe with the pico model, or its mixture of experts if a pass needs one, and little text.

    Group sizes that its widths cannot have become 32.
    """
    model = mixture_folder() if any(step.requires.experts for step in recipe.passes) else str(PICO)
    asked = recipe.model_copy(update={"model": model, "calibration": CALIBRATION, "eval": MEASURED})
    try:
        plan(asked)
    except TargetError as error:
        if "group" not in str(error) and "blocks of" not in str(error):
            raise
        return asked.model_copy(update={"passes": tuple(_regrouped(step) for step in asked.passes)})
    return asked


def _regrouped(step):
    if not isinstance(getattr(step, "group_size", None), int):
        return step
    return type(step).model_validate({**step.model_dump(mode="json"), "group_size": FITTING_GROUP})
