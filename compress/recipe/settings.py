"""Settings: single values that replace those of a recipe, as the command line gives them (`--set`, `--device`, ...)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from compress.errors import RecipeError, UserError
from compress.passes.contract.problems import Problems
from compress.passes.contract.wording import Place
from compress.recipe.yaml import plain_values


@dataclass(frozen=True)
class Setting:
    """A value at a place in the data of a recipe.

    Attributes:
        text: the setting as the user wrote it, for errors.
        removes: keys next to the place that the value makes void.
    """

    place: Place
    value: Any
    text: str
    removes: tuple[str, ...] = ()


def read_setting(text: str) -> Setting:
    """Read 'passes.0.gptq.group_size=128'; the value is YAML.

    Raises:
        RecipeError: if there is no key or the value is not YAML.
    """
    spelled = f"--set {text}"
    path, equals, value = text.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise RecipeError(f"{spelled}: write KEY=VALUE, such as passes.0.gptq.group_size=128 or save.format=native")
    try:
        parsed = plain_values(value)
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{spelled}: the value {value!r} is not YAML; put it in quotes") from error
    if isinstance(parsed, int | float) and ":" in value:  # YAML reads the pattern 2:4 as a number with base 60
        parsed = value.strip()
    return Setting(place_of(path), parsed, spelled)


def place_of(path: str) -> Place:
    """Return the place that a path such as 'passes.0.gptq.group_size' names."""
    return tuple(int(part) if part.isdecimal() else part for part in path.strip().split("."))


def apply_settings(data: Any, settings: Sequence[Setting], problems: Problems) -> Any:
    """Return a copy of the plain values of a recipe with the settings applied; presets are expanded before.

    Args:
        data: values of the recipe.
        settings: what replaces them.
        problems: receives an error for each place that cannot exist. Validating the recipe finds unknown options.
    """
    if not settings or not isinstance(data, Mapping):
        return data
    changed = copy.deepcopy(dict(data))
    for setting in settings:
        problems.attempt(_put, changed, setting)
    return changed


def _put(holder: Any, setting: Setting, depth: int = 0) -> None:
    """Set the value in the data below the first `depth` parts of the place."""
    part: Any = setting.place[depth]
    if isinstance(holder, list):
        if not isinstance(part, int) or part >= len(holder):
            raise _error(setting, depth, f"has {len(holder)} items; write an index from 0 to {len(holder) - 1}")
        inner = holder[part]
    elif isinstance(holder, dict):
        if depth == 2 and setting.place[0] == "passes" and part not in holder:
            raise _error(setting, depth, f"is {', '.join(map(str, holder))}, not {part}")
        inner = holder.get(part)
    else:
        raise _error(setting, depth, f"is the value {holder!r}, which has no options")
    if depth == len(setting.place) - 1:
        holder[part] = setting.value
        if isinstance(holder, dict):
            for name in setting.removes:
                holder.pop(name, None)
        return
    if isinstance(inner, str) and depth == 1 and setting.place[0] == "passes":
        inner = {inner: None}  # a pass without options is spelled by its name alone
    holder[part] = {} if inner is None else inner
    _put(holder[part], setting, depth + 1)


def _error(setting: Setting, depth: int, message: str) -> RecipeError:
    """Return the error for a place of which only the first `depth` parts exist."""
    return RecipeError(f"{setting.text}: {'.'.join(map(str, setting.place[:depth]))} {message}", setting.place)


def path_of(error: UserError) -> Place:
    """Return the place of a mistake in the data of a recipe; empty if it has none."""
    return error.path if isinstance(error, RecipeError) else ()


def error_of_setting(settings: Sequence[Setting], error: UserError) -> UserError | None:
    """Return the error with the setting that contains its place; None if no setting does."""
    for setting in reversed(settings):
        if path_of(error)[: len(setting.place)] == setting.place:
            begun = str(error).startswith(setting.text)
            return error if begun else RecipeError(f"{setting.text}: {error}", path_of(error))
    return None


def settings_note(settings: Sequence[Setting], error: UserError) -> str:
    """Return a note that names the settings inside of the error's place, or an empty string."""
    place = path_of(error)
    inside = [setting.text for setting in settings if place and setting.place[: len(place)] == place]
    return f" (with {' '.join(inside)})" if inside else ""
