"""Presets: one word, such as W4A16, for a tested chain of passes. Each is a YAML file of `presets/`.

A preset stands in a recipe where its passes stand: `passes: [{scheme: W4A16}]`. It is expanded before the passes are
read, so a resolved recipe lists the passes themselves. Its options of
`save` apply only to `compress quantize`. This module imports nothing slow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    """A named chain of passes. summary: one line. passes, save: plain values, as in a recipe."""

    name: str
    summary: str
    passes: tuple[Mapping[str, Any], ...]
    save: Mapping[str, Any] = field(default_factory=dict)


@cache
def presets() -> dict[str, Preset]:
    """All presets by name."""
    found = {}
    for file in sorted(files("compress.recipe").joinpath("presets").iterdir(), key=lambda file: Path(file.name).stem):
        if file.name.endswith(".yaml"):
            name, text = file.name.removesuffix(".yaml"), file.read_text(encoding="utf-8")
            summary = text.partition("\n")[0].removeprefix("# ")
            values = yaml.safe_load(text)
            found[name] = Preset(name, summary, tuple(values["passes"]), values.get("save", {}))
    return found


def preset(name: Any, place: tuple[str | int, ...] = (KEY,)) -> Preset:
    """The preset of a name; upper and lower case, '_' and '-' are equal. place: of the name, for errors.

    Raises RecipeError for an unknown name.
    """
    known = presets()
    spelled = {_plain(key): key for key in known}
    if isinstance(name, str) and _plain(name) in spelled:
        return known[spelled[_plain(name)]]
    if isinstance(name, str) and GGUF_NAME.fullmatch(name):
        raise RecipeError(
            f"scheme {name}: this type of GGUF files is not written; use one of "
            f"{', '.join(key for key, found in known.items() if found.save)}",
            place,
        )
    near = did_you_mean(str(name).upper(), known) if isinstance(name, str) else f"; use one of {', '.join(known)}"
    raise RecipeError(f"scheme {name!r} is not known{near}", place)


def expand(items: Any) -> tuple[Any, list[int]]:
    """Replace presets among the passes of a recipe, as plain values, by their passes.

    Returns the passes, and for each of them the index of the item that it comes from. Items of other kinds are left to
    the recipe, which checks them. Raises RecipeError for an unknown preset.
    """
    if not isinstance(items, Sequence) or isinstance(items, str):
        return items, []
    found: list[Any] = []
    origins: list[int] = []
    for index, item in enumerate(items):
        given = isinstance(item, Mapping) and set(item) == {KEY}
        steps = preset(item[KEY], ("passes", index, KEY)).passes if given else [item]
        found += steps
        origins += [index] * len(steps)
    return found, origins


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
