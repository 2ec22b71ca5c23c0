"""The options of passes and of other parts of a recipe, read from the source: classes are parsed, not imported.

Importing a pass imports torch and much of this package, which takes seconds. A list of passes, and a name in a recipe
that is not known, need names alone. The values of options are checked by the classes (`compress.recipe.schema`).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = __name__.partition(".")[0]
ROOT = Path(__file__).parents[2]

PARTS = {
    "": ("recipe.schema", "Recipe"),
    "calibration": ("recipe.calibration", "Calibration"),
    "save": ("recipe.schema", "Save"),
    "eval": ("recipe.evaluation", "Evaluate"),
}
"""The module and the class of each part of a recipe but its passes, by its key; '' is the recipe itself."""


@dataclass(frozen=True)
class Outline:
    """The facts about a class that its source states.

    Attributes:
        summary: first line of its docstring.
        options: its options, by their names in a recipe.
        constants: its text constants by name, such as `paper`.
    """

    summary: str
    options: tuple[str, ...]
    constants: dict[str, str]


def outline_of_pass(key: str, kind: str) -> Outline:
    """Return the outline of a built-in pass.

    Args:
        key: key of the pass in recipes.
        kind: folder of its file.
    """
    module = f"{PACKAGE}.passes.{kind}.{key}"
    title = next(name for name in _classes(module) if name.lower() == key.replace("_", ""))
    return outline(module, title)


def outline_of_part(key: str) -> Outline:
    """Return the outline of a part of `PARTS`."""
    module, title = PARTS[key]
    return outline(f"{PACKAGE}.{module}", title)


@cache
def outline(module: str, title: str) -> Outline:
    """Return the outline of a class, including the options of its base classes in this package."""
    node = _classes(module)[title]
    options, constants = dict.fromkeys(_options(node)), dict(_constants(node))
    for base in node.bases:
        place = _place_of(module, base)
        if place is not None:
            inherited = outline(*place)
            options |= dict.fromkeys(inherited.options)
            constants = inherited.constants | constants
    text = ast.get_docstring(node) or ""
    return Outline(inspect.cleandoc(text).partition("\n")[0].strip(), tuple(options), constants)


@cache
def _tree(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _tree(module).body if isinstance(node, ast.ClassDef)}


@cache
def _imported(module: str) -> dict[str, tuple[str, str]]:
    """Return, for each name that a module imports from this package, the module and the name in it."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in _tree(module).body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == PACKAGE
        for alias in node.names
    }


def _place_of(module: str, base: ast.expr) -> tuple[str, str] | None:
    """Return the module and the name of a base class; None for one of another package."""
    if isinstance(base, ast.Subscript):  # a generic class
        base = base.value
    if not isinstance(base, ast.Name):
        return None
    return (module, base.id) if base.id in _classes(module) else _imported(module).get(base.id)


def _annotated(node: ast.ClassDef) -> Iterator[tuple[str, bool, ast.expr | None]]:
    """Yield (name, whether it is a class constant, value) of each annotated name in the body of a class."""
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id, ast.unparse(line.annotation).startswith("ClassVar"), line.value


def _options(node: ast.ClassDef) -> Iterator[str]:
    """Yield the fields of a pydantic model by their names in a recipe."""
    for name, constant, value in _annotated(node):
        if not constant and not name.startswith("_"):
            words = {word.arg: word.value for word in value.keywords} if isinstance(value, ast.Call) else {}
            alias = words.get("alias")
            yield str(alias.value) if isinstance(alias, ast.Constant) else name


def _constants(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the text constants of a class, such as `paper`."""
    for name, constant, value in _annotated(node):
        if constant and isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield name, value.value
