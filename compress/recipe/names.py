"""The names in a recipe, checked against the source before anything slow is imported.

A wrong name is the most frequent mistake, and `compress.recipe.schema`, which finds all mistakes, takes seconds to
import. What is refused here is refused there with the same message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.errors import RecipeError, did_you_mean
from compress.passes import PASSES
from compress.passes.contract.wording import Place, recipe_error, unknown_option
from compress.recipe.installed import installed
from compress.recipe.outlines import PARTS, outline_of_part, outline_of_pass
from compress.recipe.presets import expand
from compress.recipe.settings import Setting, apply_settings, error_of_setting, settings_note
from compress.recipe.shipped import find_recipe
from compress.recipe.yaml import compose, nearest, read_file

SUITE = "suite"
"""The key of a suite in the values of `eval`."""

SENSITIVITY = "sensitivity"
"""The key of an item among the passes that stands for the passes of a file of sensitivities."""


def check_file(recipe: str | Path, settings: Sequence[Setting] = ()) -> None:
    """Check the names in a recipe after applying settings.

    Raises:
        RecipeError: if the file cannot be read, or a part, a pass or an option is unknown.
    """
    path = find_recipe(recipe)
    data, places = compose(read_file(path), str(path))
    origins: list[int] = []
    try:
        data, origins = _expanded(data)
        _check(data, settings)
    except RecipeError as error:
        raise located_error(error, str(path), places, origins, settings) from error


def check_data(data: Any, settings: Sequence[Setting] = ()) -> None:
    """Check the names in the plain values of a recipe, as `check_file` does for a file."""
    try:
        _check(_expanded(data)[0], settings)
    except RecipeError as error:
        setting_error = error_of_setting(settings, error)
        raise error if setting_error is None else setting_error from None


def located_error(
    error: RecipeError,
    name: str,
    places: Mapping[Place, tuple[int, int]],
    origins: Sequence[int],
    settings: Sequence[Setting],
) -> RecipeError:
    """Return the error with its line and column, or with the setting that contains it.

    Args:
        name: name of the text.
        places: places of keys and items, as returned by `compose`.
        origins: for each pass, the index of the item that it comes from.
        settings: settings that were applied to the data.
    """
    if (setting_error := error_of_setting(settings, error)) is not None:
        return setting_error
    line, column = nearest(places, _before_expansion(error.path, origins))
    return RecipeError(f"{name}:{line}:{column}: {error}{settings_note(settings, error)}", error.path)


def _before_expansion(path: Place, origins: Sequence[int]) -> Place:
    """Return a place in the data before presets were expanded."""
    index = path[1] if len(path) > 1 and path[0] == "passes" else None
    return ("passes", origins[index], *path[2:]) if isinstance(index, int) and index < len(origins) else path


def _expanded(data: Any) -> tuple[Any, list[int]]:
    """Return the data with its presets expanded, and for each pass the index of its item."""
    if not isinstance(data, Mapping) or "passes" not in data:
        return data, []
    items, origins = expand(data["passes"])
    return {**data, "passes": items}, origins


def _check(data: Any, settings: Sequence[Setting]) -> None:
    """Check the names of the data; the schema checks data of another form, and files of sensitivities."""
    if not isinstance(data, Mapping) or any(SENSITIVITY in item for item in _items(data)):
        return
    changed = apply_settings(data, settings)
    for part in PARTS:
        values = changed.get(part) if part else changed
        if isinstance(values, Mapping):
            also = (SUITE,) if part == "eval" else ()
            _check_options((part,) if part else (), values, outline_of_part(part).options, also)
    plugins = changed.get("plugins") or ()
    files = {Path(name).stem for name in plugins if isinstance(name, str)} if isinstance(plugins, Sequence) else set()
    external_keys = {*files, *installed()}
    for index, item in enumerate(_items(changed)):
        if len(item) == 1:
            ((key, options),) = item.items()
            _check_pass(("passes", index, key), str(key), options, external_keys)


def _check_pass(place: Place, key: str, options: Any, external_keys: set[str]) -> None:
    """Check the key and the options of a pass; `external_keys` are keys of passes that are not built in."""
    if key in external_keys or ":" in key:
        return
    if key not in PASSES:
        raise recipe_error(place, f"pass {key!r} is not known{did_you_mean(key, {*PASSES, *external_keys})}")
    if isinstance(options, Mapping):
        _check_options(place, options, outline_of_pass(key, PASSES.kind(key)).options)


def _check_options(
    place: Place, values: Mapping[Any, Any], options: Sequence[str], extra_options: Sequence[str] = ()
) -> None:
    for name, value in values.items():
        if name not in options and name not in extra_options:
            raise recipe_error((*place, name), unknown_option(str(name), options, value))


def _items(data: Mapping[str, Any]) -> Iterator[Mapping[Any, Any]]:
    """Yield the passes of a recipe as mappings, in order.

    An item that is neither a name nor a mapping gives an empty mapping.
    """
    passes = data.get("passes")
    for item in passes if isinstance(passes, Sequence) and not isinstance(passes, str) else ():
        yield {item: None} if isinstance(item, str) else item if isinstance(item, Mapping) else {}
