"""Recipes from one line: the data of a recipe for `compress quantize`, `prune` and `distill`. Imports nothing slow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from compress.errors import RecipeError
from compress.passes import PASSES
from compress.recipe.presets import KEY, preset

SAMPLED: Mapping[str, Any] = {"self_share": "auto"}
"""Calibration of one-line commands: half of the text is sampled from the model, where that is possible."""

FITTED: Mapping[str, Any] = {"error": "asymmetric", "alpha": 0.5}
"""Options of GPTQ with which schemes of few bits fit the output of the uncompressed model; 14 to 29% less KL
(eval/LOG.md)."""
SIZED = "gguf"
"""The scheme whose types are chosen within a size (sized.yaml)."""
FITTED_BITS = 5
"""The most bits for which one-line commands do so."""


def quantize_data(model: str, scheme: str) -> dict[str, Any]:
    """Return the recipe that quantizes a model by a preset.

    Raises:
        RecipeError: if the preset is unknown.
    """
    scheme_preset = preset(scheme)
    save = {"save": dict(scheme_preset.save)} if scheme_preset.save else {}
    return {"model": model, "passes": [{KEY: scheme_preset.name}], **save}


def quantize_line(
    model: str, scheme: str | None, bits: int | None, group_size: int | None, size: str | int | None = None
) -> tuple[dict[str, Any], Path]:
    """Return the recipe of `quantize`, by a preset or by GPTQ to integers of some bits, and its output folder.

    Args:
        size: of the checkpoint, such as '90MB', within which the bits of the layers are chosen.

    Raises:
        RecipeError: if the preset is unknown, for both a scheme and bits or none of them, for a group size of a scheme,
            and for a size of a scheme that has one type.
    """
    if size is not None or (scheme or "").lower() == SIZED:
        return _sized_line(model, scheme, bits, group_size, size)
    if scheme is not None and bits is not None:
        raise RecipeError(f"bits: replace a scheme; leave out bits={bits}, or scheme={scheme!r}")
    if scheme is None and bits is None:
        raise RecipeError("scheme: write one, such as scheme='W4A16', or bits, such as bits=4, group_size=128")
    if scheme is not None and group_size is not None:
        raise RecipeError("group_size: is an option of bits; a scheme has its own groups")
    folder = folder_of(model, scheme or f"int{bits}", group_size and f"groups-of-{group_size}")
    if scheme is not None:
        return {**quantize_data(model, scheme), "calibration": dict(SAMPLED)}, folder
    options: dict[str, Any] = {"weights": f"int{bits}"} | ({} if group_size is None else {"group_size": group_size})
    if bits is not None and bits <= FITTED_BITS:
        options |= FITTED
    passes = [{"gptq": options}]
    return {"model": model, "calibration": dict(SAMPLED), "passes": passes}, folder


def _sized_line(
    model: str, scheme: str | None, bits: int | None, group_size: int | None, size: str | int | None
) -> tuple[dict[str, Any], Path]:
    """Return the recipe that divides a size among the layers: over the types of GGUF files, or over integers."""
    if size is None:
        raise RecipeError(f"scheme {scheme}: needs the size of the file, such as size='90MB' (--size 90MB)")
    if bits is not None:
        raise RecipeError("size: chooses the bits of each layer; leave bits out")
    folder = folder_of(model, scheme, size)
    data: dict[str, Any] = {"model": model, "calibration": dict(SAMPLED)}
    if scheme is None:
        options: dict[str, Any] = {"allocate": {"size": size}} | (
            {} if group_size is None else {"group_size": group_size}
        )
        return {**data, "passes": [{"gptq": options | dict(FITTED)}]}, folder
    if scheme.lower() != SIZED or group_size is not None:
        named = f"scheme {scheme}" if group_size is None else "group_size"
        raise RecipeError(f"size: {named} has fixed bits; write scheme {SIZED} for a file of llama.cpp, or no scheme")
    stated = yaml.safe_load(files("compress.recipe").joinpath("sized.yaml").read_text(encoding="utf-8"))
    passes = [
        {name: {**options, "allocate": {"size": size, **options["allocate"]}}}
        for name, options in (next(iter(step.items())) for step in stated["passes"])
    ]
    return {**data, "passes": passes, "save": stated["save"]}, folder


def prune_line(model: str, method: str, pattern: str | None, sparsity: float | None) -> tuple[dict[str, Any], Path]:
    """Return the recipe that prunes a model by a pass and stores plain weights with zeros, and its output folder.

    Raises:
        RecipeError: if the pass does not remove weights.
    """
    if method in PASSES and PASSES.kind(method) != "prune":
        raise RecipeError(
            f"method {method}: this pass removes no weights to a sparsity or pattern; use one of "
            f"{', '.join(PASSES.of_kind('prune'))}, or write a recipe with {method} (compress passes {method})"
        )
    values = {"pattern": pattern, "sparsity": sparsity}
    options = {name: value for name, value in values.items() if value is not None}
    data = {"model": model, "calibration": dict(SAMPLED), "passes": [{method: options}], "save": {"format": "dense"}}
    return data, folder_of(model, method, pattern, sparsity)


def distill_line(student: str, teacher: str) -> tuple[dict[str, Any], Path]:
    """Return the recipe that trains all weights of a student on the outputs of a teacher, and its output folder."""
    data = {"model": student, "passes": [{"distill": {"teacher": teacher}}], "save": {"format": "dense"}}
    return data, folder_of(student, "distill")


def folder_of(model: str, *words: object) -> Path:
    """Return the default output folder: out/MODEL-WORDS; None among the words is left out."""
    plain = [re.sub(r"[^\w.]+", "-", str(word)) for word in words if word is not None]
    return Path("out") / "-".join([model_name(model), *plain])


def model_name(source: str) -> str:
    """Return the last part of a hub id, folder or .gguf file, to name an output folder."""
    name = Path(source.rstrip("/")).name.partition("@")[0]  # without a revision
    return name.removesuffix(".gguf") or "model"
