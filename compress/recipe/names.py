"""The names in a recipe, checked against the source before anything slow is imported.

A wrong name is the most frequent mistake, and `compress.recipe.schema`, which finds all mistakes, takes seconds to
import. Names that are refused here are refused there with the same message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.errors import RecipeError, UserError, did_you_mean
from compress.passes import PASSES
from compress.passes.contract.problems import Problems, together
from compress.passes.contract.wording import Place, recipe_error, unknown_option
from compress.recipe.installed import installed
from compress.recipe.outlines import PARTS, outline_of_part, outline_of_pass
from compress.recipe.presets import KEY as PRESET
from compress.recipe.presets import preset
from compress.recipe.settings import Setting, apply_settings, error_of_setting, path_of, settings_note
from compress.recipe.shipped import find_recipe
from compress.recipe.yaml import compose, nearest, read_file

SUITE = "suite"
"""The key of a suite in the values of `eval`."""

SENSITIVITY = "sensitivity"
"""The key of an item among the passes that stands for the passes of a file of sensitivities."""

Expansions = Mapping[str, Callable[[Any], Sequence[Any]]]
"""The passes that an item stands for, as plain values, by the key of the item and from its value."""

PRESETS: Expansions = {PRESET: lambda name: preset(name).passes}


def check_file(recipe: str | Path, settings: Sequence[Setting] = ()) -> None:
    """Check the names in a recipe after applying settings.

    Raises:
        RecipeError: if the file cannot be read, or a part, a pass or an option is unknown; SeveralErrors for several
            of them.
    """
    path = find_recipe(recipe)
    data, places = compose(read_file(path), str(path))
    problems, origins = _problems(data, settings)
    if problems:
        raise together([located_error(error, str(path), places, origins, settings) for error in problems])


def check_data(data: Any, settings: Sequence[Setting] = ()) -> None:
    """Check the names in the plain values of a recipe, as `check_file` does for a file."""
    problems, _ = _problems(data, settings)
    if problems:
        raise together([error_of_setting(settings, error) or error for error in problems])


def located_error(
    error: UserError,
    name: str,
    places: Mapping[Place, tuple[int, int]],
    origins: Sequence[int],
    settings: Sequence[Setting],
) -> UserError:
    """Return the error with its line and column, or with the setting that contains it.

    Args:
        name: name of the text.
        places: places of keys and items, as returned by `compose`.
        origins: for each pass, the index of the item that it comes from.
        settings: settings that were applied to the data.
    """
    if (setting_error := error_of_setting(settings, error)) is not None:
        return setting_error
    place = path_of(error)
    index = place[1] if len(place) > 1 and place[0] == "passes" else None
    if isinstance(index, int) and index < len(origins):
        place = ("passes", origins[index], *place[2:])
    line, column = nearest(places, place)
    return RecipeError(f"{name}:{line}:{column}: {error}{settings_note(settings, error)}", path_of(error))


def expanded(data: Any, expansions: Expansions) -> tuple[Any, list[int]]:
    """Return the data with some items expanded to passes, and for each pass the index of its item."""
    items = data.get("passes") if isinstance(data, Mapping) else None
    if not isinstance(items, Sequence) or isinstance(items, str):
        return data, []
    passes, origins = expanded_items(items, expansions)
    return {**data, "passes": passes}, origins


def expanded_items(items: Sequence[Any], expansions: Expansions) -> tuple[list[Any], list[int]]:
    """Return passes in place of the items that stand for some, and for each the index of its item.

    An item that cannot be expanded stays as it is; reading it as a pass raises the error.
    """
    passes: list[Any] = []
    origins: list[int] = []
    for index, item in enumerate(items):
        try:
            steps = steps_of(item, expansions)
        except RecipeError:
            steps = [item]
        passes += steps
        origins += [index] * len(steps)
    return passes, origins


def steps_of(item: Any, expansions: Expansions) -> Sequence[Any]:
    """Return the passes that an item stands for, as plain values.

    Raises:
        RecipeError: for an unknown preset, and a file of sensitivities that cannot be read.
    """
    for key, expand in expansions.items():
        if isinstance(item, Mapping) and set(item) == {key}:
            return expand(item[key])
    return [item]


def _problems(data: Any, settings: Sequence[Setting]) -> tuple[list[UserError], list[int]]:
    """Return the unknown names of the data, and for each pass the index of its item.

    The schema checks data of another form, and files of sensitivities.
    """
    problems = Problems()
    data, origins = expanded(data, PRESETS)
    if not isinstance(data, Mapping) or any(SENSITIVITY in item for item in _items(data)):
        return [], origins
    changed = apply_settings(data, settings, problems)
    for part in PARTS:
        values = changed.get(part) if part else changed
        if isinstance(values, Mapping):
            also = (SUITE,) if part == "eval" else ()
            _check_options(problems, (part,) if part else (), values, outline_of_part(part).options, also)
    plugins = changed.get("plugins") or ()
    files = {Path(name).stem for name in plugins if isinstance(name, str)} if isinstance(plugins, Sequence) else set()
    external_keys = {*files, *installed()}
    for index, item in enumerate(_items(changed)):
        if len(item) == 1:
            ((key, options),) = item.items()
            _check_pass(problems, ("passes", index, key), str(key), options, external_keys)
    return problems.errors, origins


def _check_pass(problems: Problems, place: Place, key: str, options: Any, external_keys: set[str]) -> None:
    """Check the key and the options of a pass; `external_keys` are keys of passes that are not built in."""
    if key == PRESET:
        try:
            preset(options)
        except RecipeError as error:
            problems.add(recipe_error(place, str(error)))
    elif key in external_keys or ":" in key:
        return
    elif key not in PASSES:
        hint = did_you_mean(key, {*PASSES, *external_keys})
        problems.add(recipe_error(place, f"pass {key!r} is not known{hint}"))
    elif isinstance(options, Mapping):
        _check_options(problems, place, options, outline_of_pass(key, PASSES.kind(key)).options)


def _check_options(
    problems: Problems,
    place: Place,
    values: Mapping[Any, Any],
    options: Sequence[str],
    extra_options: Sequence[str] = (),
) -> None:
    for name, value in values.items():
        if name not in options and name not in extra_options:
            problems.add(recipe_error((*place, name), unknown_option(str(name), options, value)))


def _items(data: Mapping[str, Any]) -> Iterator[Mapping[Any, Any]]:
    """Yield the passes of a recipe as mappings, in order.

    An item that is neither a name nor a mapping gives an empty mapping.
    """
    passes = data.get("passes")
    for item in passes if isinstance(passes, Sequence) and not isinstance(passes, str) else ():
        yield {item: None} if isinstance(item, str) else item if isinstance(item, Mapping) else {}
