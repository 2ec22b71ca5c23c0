"""Axes of a sweep: options of a recipe with several values each, and their combinations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import PurePosixPath
from typing import Any

import yaml

from compress.errors import RecipeError
from compress.passes.contract.wording import Place
from compress.recipe.settings import Setting, place_of, read_setting
from compress.recipe.yaml import LimitedLoader

EXAMPLE = "passes.0.gptq.group_size=32,64,128"
LONGEST = 120
"""Characters of the name of a folder; longer names end with a digest."""
DIGEST = 8
PATHS = ("model", "teacher", "source", "dataset")
"""Options whose values are named by the last part of their path."""


@dataclass(frozen=True)
class Axis:
    """An option of a recipe and its values.

    Attributes:
        settings: One for each value, all at the same place.
    """

    settings: tuple[Setting, ...]

    @property
    def place(self) -> Place:
        """The place in the data of the recipe."""
        return self.settings[0].place

    @property
    def key(self) -> str:
        """The place as text, such as 'passes.0.gptq.group_size'."""
        return ".".join(map(str, self.place))


@dataclass(frozen=True)
class Combination:
    """One value of each axis.

    Attributes:
        name: Name of its folder, such as 'group_size=64,model=small'.
        settings: One of each axis.
    """

    name: str
    settings: tuple[Setting, ...]

    @property
    def values(self) -> dict[str, Any]:
        """The value by the key of its axis."""
        return {".".join(map(str, setting.place)): setting.value for setting in self.settings}


def read_axis(text: str) -> Axis:
    """Read 'passes.0.gptq.group_size=32,64,128'; each value is YAML, and brackets and quotes protect a comma.

    Raises:
        RecipeError: if there is no key or no value, or a value is not YAML or listed twice.
    """
    spelled = f"--over {text}"
    path, equals, values = text.partition("=")
    if not equals or not all(path.strip().split(".")) or not values.strip():
        raise RecipeError(f"{spelled}: write KEY=VALUE,VALUE, such as {EXAMPLE}")
    try:
        texts = _items(values)
        settings = [read_setting(f"{path}={item}") for item in texts]
    except (yaml.YAMLError, RecipeError) as error:
        raise RecipeError(
            f"{spelled}: the values are not YAML; separate them by commas, and put a value with a comma in quotes or "
            f"brackets, such as {EXAMPLE}"
        ) from error
    return _axis(path, [setting.value for setting in settings], spelled)


def axes_of(over: Mapping[str, Iterable[Any]]) -> list[Axis]:
    """Return the axes of a mapping from keys such as 'passes.0.gptq.group_size' to their values.

    Raises:
        RecipeError: if there is no key, or a key has no values, one value alone, or a value twice.
    """
    axes = []
    for key, values in over.items():
        spelled = f"over {key}"
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise RecipeError(f"{spelled}: {values!r} is no list of values; write a list, such as [32, 64, 128]")
        axes.append(_axis(key, list(values), spelled))
    return axes


def _axis(path: str, values: Sequence[Any], spelled: str) -> Axis:
    if not all(path.strip().split(".")):
        raise RecipeError(f"{spelled}: {path!r} is no key; write one such as {EXAMPLE.partition('=')[0]}")
    if not values:
        raise RecipeError(f"{spelled}: there are no values; write at least one")
    texts = [_spelled(value) for value in values]
    if repeated := [text for text in texts if texts.count(text) > 1]:
        raise RecipeError(f"{spelled}: {repeated[0]} is listed twice; remove one of them")
    pairs = zip(values, texts, strict=True)
    return Axis(tuple(Setting(place_of(path), value, f"{path}={text}") for value, text in pairs))


def combinations(axes: Sequence[Axis]) -> list[Combination]:
    """Return all combinations of one value of each axis; the last axis varies fastest.

    Raises:
        RecipeError: if there is no axis, or two axes have the same key.
    """
    if not axes:
        raise RecipeError(f"a sweep needs options with their values; write at least one, such as {EXAMPLE}")
    keys = [axis.key for axis in axes]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise RecipeError(f"{repeated[0]} is given twice; write all of its values once")
    words = [_words(axis, label) for axis, label in zip(axes, labels(keys), strict=True)]
    names = [",".join(parts) for parts in product(*words)]
    settings = product(*(axis.settings for axis in axes))
    return [Combination(_cut(name), chosen) for name, chosen in zip(names, settings, strict=True)]


def labels(keys: Sequence[str]) -> list[str]:
    """Return short names of keys: their last words, as many as make them differ."""
    parts = [[word for word in key.split(".") if not word.isdecimal()] or [key] for key in keys]
    for count in range(1, max(map(len, parts)) + 1):
        short = [".".join(words[-count:]) for words in parts]
        if len(set(short)) == len(short):
            return short
    return list(keys)  # they differ in the numbers of passes alone


def _words(axis: Axis, label: str) -> list[str]:
    """Return 'label=value' for each value, in characters that every file system and shell takes."""
    values = [_word(setting.value, axis.place) for setting in axis.settings]
    words = [value if values.count(value) == 1 else f"{value}-{i}" for i, value in enumerate(values, start=1)]
    return [f"{label}={word}" for word in words]


def _word(value: Any, place: Place) -> str:
    text = _spelled(value)
    if place[-1] in PATHS and isinstance(value, str):
        text = PurePosixPath(value.replace("\\", "/").rstrip("/")).name.removesuffix(".gguf")
    word = re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII).rstrip("-.")
    return (word if text.startswith("-") else word.lstrip("-.")) or "empty"  # the sign of a number stays


def _spelled(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.partition("\n")[0].strip()


def _cut(name: str) -> str:
    digest = sha256(name.encode()).hexdigest()[:DIGEST]
    return name if len(name) <= LONGEST else f"{name[: LONGEST - DIGEST - 1]}-{digest}"


def _items(values: str) -> list[str]:
    """Return the texts of the items of a YAML list without its brackets.

    Raises:
        yaml.YAMLError: if they are not YAML.
    """
    text = f"[{values}]"
    root = LimitedLoader(text).get_single_node()
    if not isinstance(root, yaml.SequenceNode):
        raise yaml.YAMLError("no list")
    return [text[node.start_mark.index : node.end_mark.index] for node in root.value]
