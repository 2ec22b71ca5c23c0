"""The layers of a source that another program has quantized which the passes of a recipe need dense."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from compress.checkpoint.opened import OpenModel
from compress.checkpoint.opening import DenseLayers
from compress.errors import RecipeError, TargetError
from compress.models.structure.ends import find_ends
from compress.models.structure.select import ModuleNames
from compress.passes.contract.passes import ModelPass, chosen_linears
from compress.recipe.order import label
from compress.recipe.schema import Recipe


def kept_codes(recipe: Recipe) -> bool | DenseLayers:
    """Return what the run does with the codes of a source that another program has quantized.

    Without passes all stay. Otherwise the layers are dequantized that a pass needs dense.
    """
    return partial(dense_layers, recipe) if recipe.passes else True


def dense_layers(recipe: Recipe, opened: OpenModel) -> set[str]:
    """Return the full names of the layers on which passes work that take no codes."""
    modules, names = ModuleNames.of(opened.model, opened.blocks), set[str]()
    for index, step in enumerate(recipe.passes):
        if "quantized" not in step.never_after:
            continue
        if isinstance(step, ModelPass):  # it changes layers that read or write those that it names
            return {*opened.linear_names(), *(end.name for end in find_ends(opened.model))}
        step_label = label(index, step)
        with suppress(TargetError, RecipeError):  # reported when the recipe is resolved
            step = step.on_model(modules, step_label)
            names |= set(chosen_linears(step, modules.candidates(step.targets), step_label))
    return names
