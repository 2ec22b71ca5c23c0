"""Passes of other authors: files that a recipe lists, classes written as module:Class, and installed packages.

    plugins: [./my_pass.py]              a file holds one pass, and its name is the key: `- my_pass: {...}`
    passes: [my_package.thing:Thing]     a class of an importable module
    [project.entry-points."compress.passes"]    in the pyproject.toml of a package; the name is the key
    my_pass = "my_package.my_pass:MyPass"

Loading a pass executes its code. Therefore only what a recipe names is loaded: the files of `plugins`, the module of
`module:Class`, and the entry point whose name is a key of `passes`. `compress passes` loads all entry points.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from importlib.util import module_from_spec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TypeVar

from compress.errors import RecipeError, did_you_mean
from compress.passes import PASSES
from compress.passes.contract.discovery import class_of_file, is_class
from compress.passes.contract.passes import Pass
from compress.passes.contract.problems import Problems
from compress.passes.contract.wording import recipe_error
from compress.recipe.installed import GROUP, installed

T = TypeVar("T")

SCRIPT = "__main__"
KINDS = "LayerPass, BlockPass or ModelPass of compress.authoring"


@dataclass(frozen=True)
class Plugin:
    """A file with one pass.

    Attributes:
        text: the source that was executed.
        step: class of the pass.
    """

    path: Path
    text: str
    step: type[Pass]


_loaded: dict[tuple[str, str], Plugin] = {}
"""Every file that was executed, by its name and the sha256 of its text: the same code is the same class."""


def load_file(path: Path) -> Plugin:
    """Execute a file and return its pass; a file whose text was executed before is not executed again.

    Raises:
        RecipeError: if the file cannot be read, its code raises an error, or it holds no pass of its name.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error}); paths are relative to the recipe's folder") from error
    key = path.stem, hashlib.sha256(text.encode()).hexdigest()
    if key not in _loaded:
        module = _execute(path, text, f"compress_plugin_{key[1][:12]}.{path.stem}")
        _loaded[key] = Plugin(path, text, _pass_of_file(path, module))
    return _loaded[key]


class _Text(InspectLoader):
    """Execute the text that was read, not the file, which may change, nor its cached bytecode."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text

    def get_source(self, fullname: str) -> str:
        return self.text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.text, str(self.path))


def _execute(path: Path, text: str, name: str) -> ModuleType:
    loader = _Text(path, text)
    module = module_from_spec(ModuleSpec(name, loader, origin=str(path)))
    module.__file__ = str(path)
    sys.modules[name] = module  # pydantic looks annotations up there
    try:
        executed(lambda: loader.exec_module(module), f"{path}: its code raises")
    except RecipeError:
        del sys.modules[name]
        raise
    return module


def executed(work: Callable[[], T], place: str) -> T:
    """Return the result of external code; its errors become a RecipeError."""
    try:
        return work()
    except Exception as error:
        line = "".join(f" (line {frame.lineno})" for frame in traceback.extract_tb(error.__traceback__)[-1:])
        raise RecipeError(f"{place} {type(error).__name__}: {error}{line}; correct it") from error


def place_of_bug(error: BaseException) -> str | None:
    """Return 'FILE:LINE' of the innermost code of another author's pass that an error passed through, or None."""
    frames = list(traceback.walk_tb(error.__traceback__))
    files = {frame.f_code.co_filename for frame, _ in frames if _of_another_author(frame)}
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in frames if frame.f_code.co_filename in files]
    return lines[-1] if lines else None


def _of_another_author(frame: FrameType) -> bool:
    """Return whether a frame is of a method of a pass outside of this package."""
    return isinstance(frame.f_locals.get("self"), Pass) and not frame.f_globals["__name__"].startswith("compress.")


def _pass_of_file(path: Path, module: ModuleType) -> type[Pass]:
    try:
        step = class_of_file(module, path.stem, Pass)
    except ImportError as error:
        raise RecipeError(f"{path}: {error}") from error
    if step is None:
        raise RecipeError(f"{path}: defines no pass; define a class that derives from {KINDS}")
    return _concrete(step, str(path))


def _concrete(candidate: object, place: str) -> type[Pass]:
    """Return the object if it is the class of a pass.

    Raises:
        RecipeError: if it is anything else, or a class without its verb.
    """
    if not (is_class(candidate) and issubclass(candidate, Pass)):
        raise RecipeError(f"{place}: is not a pass; name a class that derives from {KINDS}")
    if inspect.isabstract(candidate):
        missing = ", ".join(sorted(candidate.__abstractmethods__))
        raise RecipeError(f"{place}: {candidate.__name__} does not define {missing}; define it")
    return candidate


def load_files(paths: Sequence[str]) -> dict[str, type[Pass]]:
    """Return the passes of plugin files by key.

    Raises:
        RecipeError: as `load_file`, and if two files have the same key or a file has the key of a built-in pass.
        SeveralErrors: for several such files.
    """
    plugin_by_key: dict[str, Plugin] = {}
    problems = Problems()
    for index, path in enumerate(paths):
        try:
            plugin = load_file(Path(path))
            key = plugin.step.key()
            if key in PASSES:
                raise RecipeError(f"{path}: {key} is a pass of compress already; rename the file and its class")
            if key in plugin_by_key:
                raise RecipeError(
                    f"{path}: {plugin_by_key[key].path} holds a pass {key} too; rename one of them, or remove it"
                )
        except RecipeError as error:
            problems.add(recipe_error(("plugins", index), str(error)))
            continue
        plugin_by_key[key] = plugin
    problems.check()
    return {key: plugin.step for key, plugin in plugin_by_key.items()}


def module_text(name: str) -> str | None:
    """Return the source of a module, for a plugin the text that was executed; None if there is none."""
    plugin = next((plugin for plugin in _loaded.values() if plugin.step.__module__ == name), None)
    if plugin is not None:
        return plugin.text
    try:
        return inspect.getsource(sys.modules[name])
    except (OSError, TypeError, KeyError):
        return None


def _load_installed(key: str, points: Sequence[EntryPoint]) -> type[Pass]:
    """Return the pass of an entry point.

    Raises:
        RecipeError: if several packages have the key, or the class has another key.
    """
    place = f"entry point {key!r} of {GROUP}"
    values = sorted({point.value for point in points})
    if key in PASSES:
        raise RecipeError(f"{place}: {key} is a pass of compress already; write {values[0]} instead, or uninstall it")
    if len(values) > 1:
        raise RecipeError(f"{place}: it is {' and '.join(values)}; write one of these instead, or uninstall one")
    step = _concrete(executed(points[0].load, f"{place}: loading {values[0]} raises"), place)
    if step.key() != key:
        raise RecipeError(f"{place}: the key of {values[0]} is {step.key()}; give the entry point this name")
    return step


def _import(key: str) -> type[Pass]:
    """Return the class of 'module:Class'."""
    name, _, path = key.partition(":")
    if name == SCRIPT or "<locals>" in path:
        raise RecipeError(
            f"{key!r}: a class of a script, a notebook or a function cannot be read again; "
            "put it into a separate file, and name the file in plugins"
        )
    if not (path.isidentifier() and all(part.isidentifier() for part in name.split("."))):
        raise RecipeError(f"{key!r} is not module:Class, such as my_package.my_pass:MyPass")
    message = (
        f"{key!r}: the module must be importable (a file can be named in plugins instead), but importing it raises"
    )
    module = executed(lambda: importlib.import_module(name), message)
    if not hasattr(module, path):
        pass_names = [n for n, c in vars(module).items() if is_class(c) and issubclass(c, Pass)]
        raise RecipeError(f"{key!r}: the module has no class {path!r}{did_you_mean(path, pass_names)}")
    return _concrete(getattr(module, path), repr(key))


def find(key: str, plugins: Mapping[str, type[Pass]]) -> type[Pass]:
    """Return the pass of a key in a recipe.

    Args:
        key: name of a pass, or 'module:Class'.
        plugins: passes of the recipe's plugin files, by key.

    Raises:
        RecipeError: if the key is unknown or ambiguous, or the pass cannot be loaded.
    """
    if ":" in key:
        return _import(key)
    points = installed().get(key, [])
    if key in plugins and points:
        raise RecipeError(f"pass {key!r} is in plugins and in an installed package; rename the file and its class")
    if points:
        return _load_installed(key, points)
    pass_by_key = {**PASSES, **plugins}
    if key not in pass_by_key:
        raise RecipeError(f"pass {key!r} is not known{did_you_mean(key, {*pass_by_key, *installed()})}")
    return pass_by_key[key]


def available(paths: Sequence[str] = ()) -> dict[str, type[Pass]]:
    """Return all passes by key: built-in, installed and from plugin files.

    Raises:
        RecipeError: if a pass cannot be loaded.
    """
    files = load_files(paths)
    return {**PASSES, **{key: find(key, files) for key in sorted(installed())}, **files}


def spelled(step: type[Pass]) -> str:
    """Return the key of a class in a recipe, the inverse of `find`; the recipe must list the file of a plugin."""
    key, qualified_key = step.key(), f"{step.__module__}:{step.__qualname__}"
    is_of_file = any(plugin.step is step for plugin in _loaded.values())
    is_installed = any(point.value == qualified_key for point in installed().get(key, ()))
    return key if PASSES.get(key) is step or is_of_file or is_installed else qualified_key
