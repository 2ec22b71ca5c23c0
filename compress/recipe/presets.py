"""Presets: one word, such as W4A16, for a tested chain of passes. Each is a YAML file of `presets/`.

A preset stands in a recipe where its passes stand: `passes: [{scheme: W4A16}]`. It is expanded before the passes are
read, so a resolved recipe lists the passes themselves. Its options of
`save` apply only to `compress quantize`. This module imports nothing slow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from compress.errors import RecipeError, did_you_mean

KEY = "scheme"
"""The key of a preset among the passes of a recipe."""

GGUF_NAME = re.compile(r"(I?Q\d\w*|TQ\d_\d|F16|BF16|F32)", re.IGNORECASE)
"""The names of types of GGUF files, such as Q4_K_M."""


@dataclass(frozen=True)
class Preset:
    """A named chain of passes.

    Attributes:
        summary: one line.
        passes: plain values, as in a recipe.
        save: options of `save` as plain values.
    """

    name: str
    summary: str
    passes: tuple[Mapping[str, Any], ...]
    save: Mapping[str, Any] = field(default_factory=dict)


@cache
def presets() -> dict[str, Preset]:
    """Return all presets by name."""
    preset_by_name = {}
    for file in sorted(files("compress.recipe").joinpath("presets").iterdir(), key=lambda file: Path(file.name).stem):
        if file.name.endswith(".yaml"):
            name, text = file.name.removesuffix(".yaml"), file.read_text(encoding="utf-8")
            summary = text.partition("\n")[0].removeprefix("# ")
            values = yaml.safe_load(text)
            preset_by_name[name] = Preset(name, summary, tuple(values["passes"]), values.get("save", {}))
    return preset_by_name


def preset(name: Any) -> Preset:
    """Return the preset of a name; case is ignored, and '_' equals '-'.

    Raises:
        RecipeError: if the name is unknown.
    """
    preset_by_name = presets()
    spelled = {_plain(key): key for key in preset_by_name}
    if isinstance(name, str) and _plain(name) in spelled:
        return preset_by_name[spelled[_plain(name)]]
    if isinstance(name, str) and GGUF_NAME.fullmatch(name):
        raise RecipeError(
            f"scheme {name}: this type of GGUF files is not written; use one of "
            f"{', '.join(key for key, candidate in preset_by_name.items() if candidate.save)}"
        )
    choices = f"; use one of {', '.join(preset_by_name)}"
    near = did_you_mean(name.upper(), preset_by_name) if isinstance(name, str) else choices
    raise RecipeError(f"scheme {name!r} is not known{near}")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
