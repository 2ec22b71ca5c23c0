"""Open the models that a run compares with: its own model before the first pass, teachers, and models in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from os.path import expanduser
from pathlib import Path

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.blockwise.install import adapt, adapt_block
from compress.checkpoint.containers.digests import SUMS
from compress.checkpoint.opened import OpenModel
from compress.checkpoint.opening import open_model
from compress.checkpoint.sources.gguf_parts import gguf_of, parts_of
from compress.checkpoint.sources.vocabulary import with_vocabulary_of
from compress.errors import RecipeError
from compress.layers.scheme import LayerScheme
from compress.models.structure.ends import compressed_ends
from compress.passes.contract.context import Run
from compress.passes.contract.passes import ModelPass
from compress.pipeline.dequantized import dense_layers, kept_codes
from compress.pipeline.resolve import schemes_of
from compress.recipe.paths import located
from compress.recipe.schema import Recipe
from compress.recipe.yaml import plain_values, read_file

RECIPE = "recipe.yaml"
"""The recipe in the folder of a run."""


def open_start(recipe: Recipe, device: torch.device) -> OpenModel:
    """Open the model that a run starts with. Raises ModelError."""
    codes, narrow = kept_codes(recipe), maps_ends(recipe)
    return open_model(recipe.model, recipe.dtype, device, recipe.trust_remote_code, recipe.masks, codes, narrow)


def take_in_compressed(opened: OpenModel, run: Run) -> None:
    """Convert the layers of a compressed checkpoint to forms that the format can store, each when it is loaded."""
    if not opened.weights.has_layers:
        return
    format_ = run.format
    opened.weights.settle = partial(adapt_block, run=run, dtype=opened.dtype)
    for name, layer in compressed_ends(opened.model).items():
        adapt(layer, run, opened.dtype, f"model: {name}")
    if format_.adapt(LayerScheme((1, 1))) is None and any(s.quantized for s in schemes_of(opened).values()):
        message = f"format {format_.name} stores the dequantized weights of its quantized linears"
        run.journal.add("note", "model", message)


def maps_ends(recipe: Recipe) -> bool:
    """Return whether embedding and head may stay mapped, in a narrower dtype of their file (`Checkpoint.narrow_ends`).

    Not if a pass or a survey computes with the whole model, or if they are rounded: by the format, or to a dtype.
    """
    surveys = [step.survey() for step in recipe.passes]
    uses_whole_model = any(isinstance(step, ModelPass) for step in recipe.passes) or any(
        survey and survey.whole for survey in surveys
    )
    return not uses_whole_model and recipe.save.dtype == "auto" and recipe.save.target().file is None


def original_of(source: str) -> str:
    """Return the model that a chain of runs started with, by their recipes; `source` if no run wrote it."""
    visited: set[str] = set()
    while source not in visited:
        visited.add(source)
        folder = Path(expanduser(source))
        try:
            written = (folder / SUMS).exists()  # by a run
            recipe = plain_values(read_file(folder / RECIPE)) if written else None
        except (RecipeError, yaml.YAMLError):  # no recipe of a run
            break
        model = located({"model": recipe.get("model")}, folder)["model"] if isinstance(recipe, dict) else None
        source = model if isinstance(model, str) else source
    return source


def open_teacher(
    recipe: Recipe, opened: OpenModel, source: str | None = None
) -> AbstractContextManager[PreTrainedModel]:
    """Open a teacher by its source; None: the uncompressed model, also if the run starts with a compressed one."""
    teacher = open_source(original_of(recipe.model) if source is None else source, recipe, opened)
    return with_vocabulary_of(opened.config, teacher)


def open_original(recipe: Recipe, opened: OpenModel) -> OpenModel:
    """Open the uncompressed model in the dtype of `opened`. Raises ModelError."""
    dtype = str(opened.dtype).removeprefix("torch.")
    codes = partial(dense_layers, recipe)
    return open_model(original_of(recipe.model), dtype, opened.device, recipe.trust_remote_code, "forget", codes)


def open_source(source: str, recipe: Recipe, opened: OpenModel) -> AbstractContextManager[PreTrainedModel]:
    """Open a model as it is stored; only one block's weights are in memory while it runs.

    The time in which it waits for the disk is added to that of `opened`.
    """
    codes = partial(dense_layers, recipe)
    teacher = open_model(source, recipe.dtype, opened.device, recipe.trust_remote_code, "forget", codes)
    teacher.weights.reading = opened.weights.reading
    return teacher.streaming()


def in_memory(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> OpenModel:
    """Open a model in memory, under the name of its class."""
    return OpenModel.in_memory(model.eval(), tokenizer, type(model).__name__)


def source_bytes(opened: OpenModel) -> int | None:
    """Return the bytes of the weight files of a model as it was given; None if they are unknown.

    A .gguf file counts as it is, also if its dequantized weights are read from a cache.
    """
    file = gguf_of(opened.source)
    if file is not None and file.is_file():
        return sum(part.stat().st_size for part in parts_of(file))
    checkpoint = opened.weights.checkpoint
    if checkpoint is None:
        return None
    return sum(file.stat().st_size for file in {place.path for place in checkpoint.stored.values()})
