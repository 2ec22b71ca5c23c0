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
from types import CodeType, ModuleType
from typing import TypeVar

from compress.errors import RecipeError, did_you_mean
from compress.passes import PASSES
from compress.passes.contract.discovery import class_of_file, is_class
from compress.passes.contract.passes import Pass
from compress.passes.contract.wording import recipe_error
from compress.recipe.installed import GROUP, installed

T = TypeVar("T")

SCRIPT = "__main__"
KINDS = "LayerPass, BlockPass or ModelPass of compress.passes.contract.passes"


@dataclass(frozen=True)
class Plugin:
    """A file with one pass. text: the source that was executed. step: the class of the pass."""

    path: Path
    text: str
    step: type[Pass]


_loaded: dict[tuple[str, str], Plugin] = {}
"""Every file that was executed, by its name and the sha256 of its text: the same code is the same class."""


def load_file(path: Path) -> Plugin:
    """Execute a file and return its pass; a file whose text was executed before is not executed again.

    Raises RecipeError: the file cannot be read, its code raises an error, or it holds no pass that is called like it.
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
    """Execute a given text, not the file, which may change, nor a cached file of its bytecode."""

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


def executed(work: Callable[[], T], where: str) -> T:
    """The result of code of other authors, whose errors become a RecipeError."""
    try:
        return work()
    except Exception as error:
        line = "".join(f" (line {frame.lineno})" for frame in traceback.extract_tb(error.__traceback__)[-1:])
        raise RecipeError(f"{where} {type(error).__name__}: {error}{line}; correct it") from error


def _pass_of_file(path: Path, module: ModuleType) -> type[Pass]:
    try:
        found = class_of_file(module, path.stem, Pass)
    except ImportError as error:
        raise RecipeError(f"{path}: {error}") from error
    if found is None:
        raise RecipeError(f"{path}: defines no pass; define a class that derives from {KINDS}")
    return _concrete(found, str(path))


def _concrete(found: object, where: str) -> type[Pass]:
    """The class of a pass. Raises RecipeError for anything else, and for a class without its verb."""
    if not (is_class(found) and issubclass(found, Pass)):
        raise RecipeError(f"{where}: is not a pass; name a class that derives from {KINDS}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise RecipeError(f"{where}: {found.__name__} does not define {missing}; define it")
    if not isinstance(getattr(found, "paper", None), str):
        raise RecipeError(f"{where}: {found.__name__} has no paper; add paper: ClassVar[str] with the source's address")
    return found


def load_files(paths: Sequence[str]) -> dict[str, type[Pass]]:
    """The passes of plugin files, by key.

    Raises RecipeError as `load_file` does, and for a key that is there twice or is that of a pass of this package.
    """
    found: dict[str, Plugin] = {}
    for index, path in enumerate(paths):
        try:
            plugin = load_file(Path(path))
            key = plugin.step.key()
            if key in PASSES:
                raise RecipeError(f"{path}: {key} is a pass of compress already; rename the file and its class")
            if key in found:
                raise RecipeError(f"{path}: {found[key].path} holds a pass {key} too; rename one of them, or remove it")
        except RecipeError as error:
            raise recipe_error(("plugins", index), str(error)) from error
        found[key] = plugin
    return {key: plugin.step for key, plugin in found.items()}


def module_text(name: str) -> str | None:
    """The source of a module; None if there is none. The source of a plugin is the text that was executed."""
    plugin = next((plugin for plugin in _loaded.values() if plugin.step.__module__ == name), None)
    if plugin is not None:
        return plugin.text
    try:
        return inspect.getsource(sys.modules[name])
    except (OSError, TypeError, KeyError):
        return None


def _load_installed(key: str, points: Sequence[EntryPoint]) -> type[Pass]:
    """The pass of an entry point. Raises RecipeError if several packages have the key, or its class has another one."""
    where = f"entry point {key!r} of {GROUP}"
    values = sorted({point.value for point in points})
    if key in PASSES:
        raise RecipeError(f"{where}: {key} is a pass of compress already; write {values[0]} instead, or uninstall it")
    if len(values) > 1:
        raise RecipeError(f"{where}: it is {' and '.join(values)}; write one of these instead, or uninstall one")
    step = _concrete(executed(points[0].load, f"{where}: loading {values[0]} raises"), where)
    if step.key() != key:
        raise RecipeError(f"{where}: the key of {values[0]} is {step.key()}; give the entry point this name")
    return step


def _import(key: str) -> type[Pass]:
    """The class of 'module:Class'."""
    name, _, path = key.partition(":")
    if name == SCRIPT or "<locals>" in path:
        raise RecipeError(
            f"{key!r}: a class of a script, a notebook or a function cannot be read again; "
            "put it into a file of its own, and name the file in plugins"
        )
    if not (path.isidentifier() and all(part.isidentifier() for part in name.split("."))):
        raise RecipeError(f"{key!r} is not module:Class, such as my_package.my_pass:MyPass")
    message = (
        f"{key!r}: the module must be importable (a file can be named in plugins instead), but importing it raises"
    )
    module = executed(lambda: importlib.import_module(name), message)
    if not hasattr(module, path):
        known = [n for n, c in vars(module).items() if is_class(c) and issubclass(c, Pass)]
        raise RecipeError(f"{key!r}: the module has no class {path!r}{did_you_mean(path, known)}")
    return _concrete(getattr(module, path), repr(key))


def find(key: str, plugins: Mapping[str, type[Pass]]) -> type[Pass]:
    """The pass of a key in a recipe. plugins: those of its files. Raises RecipeError."""
    if ":" in key:
        return _import(key)
    points = installed().get(key, [])
    if key in plugins and points:
        raise RecipeError(f"pass {key!r} is in plugins and in an installed package; rename the file and its class")
    if points:
        return _load_installed(key, points)
    known = {**PASSES, **plugins}
    if key not in known:
        raise RecipeError(f"pass {key!r} is not known{did_you_mean(key, {*known, *installed()})}")
    return known[key]


def available(paths: Sequence[str] = ()) -> dict[str, type[Pass]]:
    """All passes by key: those of this package, of installed packages, and of plugin files. Raises RecipeError."""
    files = load_files(paths)
    return {**PASSES, **{key: find(key, files) for key in sorted(installed())}, **files}


def spelled(step: type[Pass]) -> str:
    """The key of a class in a recipe, the inverse of `find`: of a file's class, if the recipe lists the file."""
    key, whole = step.key(), f"{step.__module__}:{step.__qualname__}"
    of_file = any(plugin.step is step for plugin in _loaded.values())
    named = PASSES.get(key) is step or of_file or any(point.value == whole for point in installed().get(key, ()))
    return key if named else whole
