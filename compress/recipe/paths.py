"""Paths in a recipe: those in its file are relative to the folder of the file, other ones to the current folder.

A published recipe names no folder of the user's machine: paths are relative to the recipe where the two are near each
other, and otherwise the name of the file or folder alone. The report has the sha256 of every model and text.

Among the options of a pass, also of a plugin, those of the types `pathlib.Path` and `ModelSource` are paths.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os.path import abspath, expanduser
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from compress.data.dataset_rows import BUILDERS
from compress.data.text_source import FILES, is_folder
from compress.passes.contract.discovery import is_class
from compress.passes.contract.options import MODEL_SOURCE
from compress.passes.contract.passes import Pass
from compress.passes.contract.problems import Problems
from compress.passes.contract.wording import Place, recipe_error
from compress.recipe.names import SENSITIVITY
from compress.recipe.plugins import find, load_files
from compress.recipe.shipped import SUFFIXES

NEAR = 3  # parts of the folder around a recipe and a path, such as / home alice, so that the path between hides them

Change = Callable[[str, Place], str]


def with_paths(data: Any, change: Change, folder: Path | None = None) -> Any:
    """Return a copy of the plain values of a recipe in which paths are changed.

    Args:
        data: values of any form; what is no mapping of a recipe stays as it is.
        change: returns the new spelling of a path, which it gets with its place.
        folder: folder to which relative paths are relative; None: the current one.
    """
    base = Path() if folder is None else folder

    def model(value: Any, place: Place) -> Any:
        is_path = isinstance(value, str) and (_marked(value) or value.endswith(".gguf") or (base / value).exists())
        return change(value, place) if is_path else value

    def ending(*suffixes: str) -> Callable[[Any, Place], Any]:
        return lambda value, place: change(value, place) if _ends(value, suffixes) else value

    def data_set(value: Any, place: Place) -> Any:
        return change(value, place) if _ends(value, BUILDERS) else model(value, place)

    def source(value: Any, place: Place) -> Any:
        return change(value, place) if is_folder(value) or _ends(value, FILES) else value

    def always(value: Any, place: Place) -> Any:
        return change(value, place) if isinstance(value, str) else value

    def text(value: Any, place: Place) -> Any:
        if not isinstance(value, Mapping):
            return source(value, place)
        fields = {"source": source, "dataset": data_set, "chat_template": always, "mixture": each(text)}
        return of_mapping(value, place, fields)

    def each(inner: Callable[[Any, Place], Any]) -> Callable[[Any, Place], Any]:
        def of_list(value: Any, place: Place) -> Any:
            return [inner(item, (*place, i)) for i, item in enumerate(value)] if isinstance(value, list) else value

        return of_list

    def of_mapping(value: Any, place: Place, fields: Mapping[str, Callable[[Any, Place], Any]]) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: fields[key](inner, (*place, key)) if key in fields else inner for key, inner in value.items()}

    def evaluation(value: Any, place: Place) -> Any:
        if not isinstance(value, Mapping):
            return ending(*SUFFIXES)(value, place)
        fields = {"perplexity": each(text), "agreement": each(text), "tasks": each(ending(*SUFFIXES))}
        return of_mapping(value, place, {**fields, "suite": ending(*SUFFIXES), "data": always})

    def step(value: Any, place: Place) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: of_mapping(options, (*place, key), options_of(key)) for key, options in value.items()}

    def options_of(key: str) -> Mapping[str, Callable[[Any, Place], Any]]:
        if key == SENSITIVITY:
            return {"file": always}
        kind = class_of(key)
        return {} if kind is None else fields_of(kind)

    def fields_of(kind: type[BaseModel]) -> dict[str, Callable[[Any, Place], Any]]:
        types = {field.alias or name: (field.annotation, *field.metadata) for name, field in kind.model_fields.items()}
        return {name: inner for name, kinds in types.items() if (inner := of_types(kinds)) is not None}

    def of_types(kinds: Iterable[Any]) -> Callable[[Any, Place], Any] | None:
        return next((inner for inner in map(of_type, kinds) if inner is not None), None)

    def of_type(kind: Any) -> Callable[[Any, Place], Any] | None:
        if kind is Path or kind is MODEL_SOURCE:
            return always if kind is Path else model
        if is_class(kind) and issubclass(kind, BaseModel):
            fields = fields_of(kind)
            return (lambda value, place: of_mapping(value, place, fields)) if fields else None
        inner = of_types(get_args(kind))
        return each(inner) if inner is not None and get_origin(kind) in (list, tuple, Sequence) else inner

    class_of = _passes_of(data, base)
    parts = {"model": model, "calibration": text, "plugins": each(always), "passes": each(step), "eval": evaluation}
    return of_mapping(data, (), parts)


def _passes_of(data: Any, folder: Path) -> Callable[[str], type[Pass] | None]:
    """Return a function from the key of a pass to its class; None for what reading the recipe will refuse."""
    listed = data.get("plugins") if isinstance(data, Mapping) else None
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    problems = Problems()
    plugins = problems.attempt(load_files, [str(folder / expanduser(name)) for name in names]) or {}
    return lambda key: problems.attempt(find, str(key), plugins)


def located(data: Any, folder: Path, problems: Problems | None = None, replaced: Collection[Place] = ()) -> Any:
    """Return the plain values of a recipe file with absolute paths.

    Args:
        data: values of the file.
        folder: folder of the file.
        problems: receives an error for each path that exists in the current folder, and not in that of the recipe;
            None: the errors are raised.
        replaced: places whose values will be replaced, which are not read.
    """
    root, collected = Path(abspath(folder)), Problems() if problems is None else problems

    def absolute(value: str, place: Place) -> str:
        path = expanduser(value)
        if any(place[: len(other)] == other for other in replaced):
            return value
        if not (root / path).exists() and Path(path).exists():
            reason = f"{value} is not in the folder of the recipe, to which its paths are relative"
            collected.add(recipe_error(place, f"{reason}; write {os.path.relpath(path, root)}"))
        return os.path.normpath(root / path)

    def check(value: str, place: Place) -> str:
        return absolute(value, place) if Path() != root and not (root / expanduser(value)).exists() else value

    with_paths(data, check)  # names of models and data sets that are paths in the current folder alone
    changed = with_paths(data, absolute, root)
    if problems is None:
        collected.check()
    return changed


def stored(data: Any, folder: Path, public: bool = False) -> Any:
    """Return the plain values of a recipe with its paths as a file in a folder has them.

    Args:
        data: values of a recipe, in which paths are relative to the current folder.
        folder: folder of the file.
        public: whether paths that are not near the folder become names; otherwise they are absolute.
    """

    def spelled(value: str, place: Place) -> str:
        path = abspath(expanduser(value))
        if _near(path, abspath(folder)):
            between = Path(os.path.relpath(path, abspath(folder))).as_posix()
            return between if between.startswith(".") or place[0] != "model" else f"./{between}"
        return Path(path).name if public else path

    return with_paths(data, spelled)


def paths_of_passes(data: Any) -> list[str]:
    """Return the paths of files and folders among the options of the passes, as in the plain values of a recipe."""
    names: list[str] = []

    def note(value: str, place: Place) -> str:
        if place[0] == "passes" and Path(value).exists():
            names.append(value)
        return value

    with_paths(data, note)
    return names


def without_folders(values: Any, data: Any) -> Any:
    """Return plain values in whose texts the paths of a recipe are the names of their files and folders.

    Args:
        values: plain values, such as those of a report.
        data: values of the recipe.
    """
    names: dict[str, str] = {}

    def note(value: str, place: Place) -> str:
        for path in (value, expanduser(value), abspath(expanduser(value))):
            if Path(path).name:
                names[path] = Path(path).name
        return value

    with_paths(data, note)
    ordered = sorted(names, key=len, reverse=True)

    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {changed(key): changed(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [changed(inner) for inner in value]
        if not isinstance(value, str) or value in names:
            return names.get(value, value) if isinstance(value, str) else value
        for path in ordered:
            value = value.replace(path, names[path]) if os.path.isabs(path) else value
        return value

    return changed(values)


def _marked(value: str) -> bool:
    """Return whether a name of a model is a path by its form."""
    return value.startswith((".", "/", "~")) or value.partition("@")[0].count("/") > 1


def _ends(value: Any, suffixes: Collection[str]) -> bool:
    return isinstance(value, str) and Path(value).suffix in suffixes


def _near(path: str, folder: str) -> bool:
    try:
        return len(Path(os.path.commonpath([path, folder])).parts) >= NEAR
    except ValueError:  # on two drives of Windows
        return False
