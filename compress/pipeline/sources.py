"""Open the models that a run compares with: its own model before the first pass, teachers, and models in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from os.path import expanduser
from pathlib import Path

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.checkpoint.containers.digests import SUMS
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.opening import open_model
from compress.errors import RecipeError
from compress.passes.contract.passes import ModelPass
from compress.recipe.schema import Recipe
from compress.recipe.yaml import plain_values, read_file

RECIPE = "recipe.yaml"
"""The recipe in the folder of a run."""


def open_start(recipe: Recipe, device: torch.device) -> OpenModel:
    """Open the model that a run starts with. Raises ModelError."""
    codes, narrow = not recipe.passes, maps_ends(recipe)
    return open_model(recipe.model, recipe.dtype, device, recipe.trust_remote_code, recipe.masks, codes, narrow)


def maps_ends(recipe: Recipe) -> bool:
    """Whether embedding and head may stay mapped, in a narrower dtype of their file (`Checkpoint.narrow_ends`).

    Not if a pass or a survey computes with the whole model, or if they are rounded: by the format, or to a dtype.
    """
    surveys = [step.survey() for step in recipe.passes]
    whole = any(isinstance(step, ModelPass) for step in recipe.passes) or any(each and each.whole for each in surveys)
    return not whole and recipe.save.dtype == "auto" and recipe.save.target().file is None


def original_of(source: str) -> str:
    """The model that a chain of runs started with, by the recipes in their folders; `source` if no run wrote it."""
    seen: set[str] = set()
    while source not in seen:
        seen.add(source)
        folder = Path(expanduser(source))
        try:
            written = (folder / SUMS).exists()  # by a run
            recipe = plain_values(read_file(folder / RECIPE)) if written else None
        except (RecipeError, yaml.YAMLError):  # no recipe of a run
            break
        model = recipe.get("model") if isinstance(recipe, dict) else None
        source = model if isinstance(model, str) else source
    return source


def open_teacher(
    recipe: Recipe, opened: OpenModel, other: str | None = None
) -> AbstractContextManager[PreTrainedModel]:
    """Open a teacher by its source; None: the uncompressed model, also if the run starts with a compressed one."""
    return open_source(original_of(recipe.model) if other is None else other, recipe, opened)


def open_original(recipe: Recipe, opened: OpenModel) -> OpenModel:
    """Open the uncompressed model in the dtype of `opened`. Raises ModelError."""
    dtype = str(opened.dtype).removeprefix("torch.")
    return open_model(original_of(recipe.model), dtype, opened.device, recipe.trust_remote_code, masks="forget")


def open_source(source: str, recipe: Recipe, opened: OpenModel) -> AbstractContextManager[PreTrainedModel]:
    """Open a model as it is stored; only one block's weights are in memory while it runs.

    The time in which it waits for the disk is added to that of `opened`.
    """
    found = open_model(source, recipe.dtype, opened.device, recipe.trust_remote_code, masks="forget")
    found.weights.reading = opened.weights.reading
    return found.streaming()


def in_memory(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> OpenModel:
    """Open a model in memory, under the name of its class."""
    return OpenModel.in_memory(model.eval(), tokenizer, type(model).__name__)
