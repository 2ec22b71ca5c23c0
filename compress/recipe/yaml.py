"""Read YAML text as plain values, with the line and column of every key and item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from yaml.reader import ReaderError

from compress.api.options import Place
from compress.errors import RecipeError

KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


def compose(text: str, name: str) -> tuple[Any, dict[Place, tuple[int, int]]]:
    """Return plain values, and (line, column), counted from 1, of every key and item; name: of the text, for errors.

    Raises RecipeError.
    """
    places: dict[Place, tuple[int, int]] = {(): (1, 1)}

    def walk(node: yaml.Node, path: Place, above: tuple[yaml.Node, ...]) -> None:
        mark = _start(node)
        places.setdefault(path, mark)
        if node in above:
            raise RecipeError(
                f"{name}:{mark[0]}:{mark[1]}: an alias refers to the value that contains it; write the value out"
            )
        if isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                walk(item, (*path, i), (*above, node))
        elif isinstance(node, yaml.ScalarNode):
            _check_scalar(node, name)
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                line, column = _start(key)
                if not isinstance(key, yaml.ScalarNode) or key.tag not in KEY_TAGS:
                    raise RecipeError(f"{name}:{line}:{column}: a key must be a string; put it in quotes")
                if key.value in seen:
                    raise RecipeError(f"{name}:{line}:{column}: duplicate key {key.value!r}; remove one")
                seen.add(key.value)
                place = (*path, key.value)
                places[place] = line, column
                walk(value, place, (*above, node))

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise RecipeError(f"{name}: the file is empty; a recipe needs the keys model and passes")
        walk(root, (), ())
        return yaml.safe_load(text), places
    except yaml.YAMLError as error:
        raise RecipeError(f"{_where(error, text, name)}: invalid YAML: {_reason(error)}") from error


def _check_scalar(node: yaml.ScalarNode, name: str) -> None:
    """Raise RecipeError for a scalar with the form of a value but without one, such as a date in the 13th month."""
    try:
        yaml.SafeLoader("").construct_object(node)
    except ValueError as error:
        line, column = _start(node)
        raise RecipeError(
            f"{name}:{line}:{column}: {node.value!r} is not a valid value ({error}); put it in quotes"
        ) from error


def _where(error: yaml.YAMLError, text: str, name: str) -> str:
    """The place of an error, 'recipe.yaml:3:1', as far as the parser reports it."""
    if isinstance(error, ReaderError):  # a character that YAML does not allow
        before = text[: error.position]
        return f"{name}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
    mark = getattr(error, "problem_mark", None)
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


def _reason(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]


def _start(node: yaml.Node) -> tuple[int, int]:
    """Line and column of a node, from 1."""
    return node.start_mark.line + 1, node.start_mark.column + 1


def nearest(places: Mapping[Place, tuple[int, int]], path: Place) -> tuple[int, int]:
    """The place of a path, or of the innermost part of it that has one."""
    while path not in places:
        path = path[:-1]
    return places[path]
