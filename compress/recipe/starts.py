"""Recipes from one line: the data of a recipe for `compress quantize`, `prune` and `distill`. Imports nothing slow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from compress.recipe.presets import KEY, preset


def quantize_data(model: str, scheme: str) -> dict[str, Any]:
    """The recipe that quantizes a model by a preset. Raises RecipeError for an unknown preset."""
    found = preset(scheme)
    save = {"save": dict(found.save)} if found.save else {}
    return {"model": model, "passes": [{KEY: found.name}], **save}


def prune_data(model: str, method: str, pattern: str | None, sparsity: float | None) -> dict[str, Any]:
    """The recipe that prunes a model by a pass, and stores it as plain weights with zeros, for all programs."""
    given = {"pattern": pattern, "sparsity": sparsity}
    options = {name: value for name, value in given.items() if value is not None}
    return {"model": model, "passes": [{method: options}], "save": {"format": "dense"}}


def distill_data(student: str, teacher: str) -> dict[str, Any]:
    """The recipe that trains all weights of a student on the outputs of a teacher, and stores it as plain weights."""
    return {"model": student, "passes": [{"distill": {"teacher": teacher}}], "save": {"format": "dense"}}


def folder_of(model: str, *words: object) -> Path:
    """The output folder without -o: out/ and the names of the model and of what is done; None is left out."""
    plain = [re.sub(r"[^\w.]+", "-", str(word)) for word in words if word is not None]
    return Path("out") / "-".join([model_name(model), *plain])


def model_name(source: str) -> str:
    """The last part of a hub id, folder or .gguf file, to name an output folder."""
    name = Path(source.rstrip("/")).name.partition("@")[0]  # without a revision
    return name.removesuffix(".gguf") or "model"
