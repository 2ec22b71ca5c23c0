"""Read YAML text as plain values, with the line and column of every key and item.

A recipe may come from anybody: its size, its depth and the values that its aliases stand for are limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from compress.errors import RecipeError
from compress.passes.contract.problems import Problems
from compress.passes.contract.wording import Place

KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


LARGEST = 1 << 20  # bytes; the metadata of some model cards have half of it
MOST_VALUES = 50_000
DEEPEST = 32


class LimitedLoader(yaml.SafeLoader):
    """Load at most `MOST_VALUES` values in at most `DEEPEST` levels; an alias counts as all values it stands for.

    Raises:
        MarkedYAMLError: if a limit is exceeded, or an alias is inside of its own value.
    """

    def __init__(self, text: str) -> None:
        if len(text) > LARGEST:
            raise yaml.YAMLError(f"the text is longer than {LARGEST >> 20} MiB; write a shorter one")
        super().__init__(text)
        self._depth = self._count = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node, or look up the node of an alias."""
        mark, previous_count, is_alias = self.peek_event().start_mark, self._count, self.check_event(yaml.AliasEvent)
        if self._depth == DEEPEST:
            raise _refused(f"values are nested in more than {DEEPEST} levels; write fewer", mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and node not in self._sizes:
            raise _refused("an alias refers to the value that contains it; write the value out", node.start_mark)
        self._count += self._sizes[node] if is_alias else 1
        if self._count > MOST_VALUES:
            raise _refused(
                f"there are more than {MOST_VALUES} values, with those that aliases stand for; write fewer", mark
            )
        self._sizes.setdefault(node, self._count - previous_count)
        return node


def _refused(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def plain_values(text: str) -> Any:
    """Return the plain values of YAML text.

    Raises:
        yaml.YAMLError: if the text is not YAML.
        ValueError: if a scalar has the form of a value but is none, such as a date in the 13th month.
    """
    loader = LimitedLoader(text)
    root = loader.get_single_node()
    return None if root is None else loader.construct_document(root)


def yaml_of(values: Any) -> str:
    """Return plain values as YAML text, in their order."""
    return yaml.safe_dump(values, sort_keys=False)


def read_file(path: Path) -> str:
    """Return the text of a YAML file.

    Raises:
        RecipeError: if the file cannot be read or is too large.
    """
    if path.is_fifo():  # it would be empty when it is read again
        raise RecipeError(f"{path}: is a pipe; write the recipe to a file first")
    if path.is_dir():
        inside = path / "recipe.yaml"
        hint = str(inside) if inside.is_file() else "that of a .yaml file"
        raise RecipeError(f"{path}: is a folder, not a recipe; write {hint}")
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise RecipeError(f"{path}: has more than {LARGEST >> 20} MiB, so it is no recipe; write a shorter one")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from error


def compose(text: str, name: str, duplicates: Problems | None = None) -> tuple[Any, dict[Place, tuple[int, int]]]:
    """Return plain values, and (line, column), counted from 1, of every key and item.

    Args:
        text: YAML text.
        name: name of the text, for errors.
        duplicates: keys that occur twice are collected here; the last value counts. None: they are raised.

    Raises:
        RecipeError: if the text is not YAML, a key is no string or occurs twice, or a scalar is not valid.
        SeveralErrors: for several such keys and scalars.
    """
    problems, repeated = Problems(), Problems()
    places: dict[Place, tuple[int, int]] = {(): (1, 1)}

    def walk(node: yaml.Node, path: Place) -> None:
        places.setdefault(path, _start(node))
        if isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                walk(item, (*path, i))
        elif isinstance(node, yaml.ScalarNode):
            problems.attempt(_check_scalar, node, name)
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                line, column = _start(key)
                if not isinstance(key, yaml.ScalarNode) or key.tag not in KEY_TAGS:
                    problems.add(RecipeError(f"{name}:{line}:{column}: a key must be a string; put it in quotes"))
                    continue
                if key.value in keys:
                    repeated.add(RecipeError(f"{name}:{line}:{column}: duplicate key {key.value!r}; remove one"))
                keys.add(key.value)
                place = (*path, key.value)
                places[place] = line, column
                walk(value, place)

    try:
        loader = LimitedLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise RecipeError(f"{name}: the file is empty; a recipe needs the keys model and passes")
        walk(root, ())
        if problems.errors or duplicates is None:
            repeated.errors += problems.errors
            repeated.check()
        else:
            duplicates.errors += repeated.errors
        return loader.construct_document(root), places
    except yaml.YAMLError as error:
        raise RecipeError(f"{_where(error, text, name)}: invalid YAML: {_reason(error)}") from error


def _check_scalar(node: yaml.ScalarNode, name: str) -> None:
    """Raise RecipeError for a scalar that has the form of a value but is none, such as a date in the 13th month."""
    try:
        yaml.SafeLoader("").construct_object(node)
    except ValueError as error:
        line, column = _start(node)
        raise RecipeError(
            f"{name}:{line}:{column}: {node.value!r} is not a valid value ({error}); put it in quotes"
        ) from error


def _where(error: yaml.YAMLError, text: str, name: str) -> str:
    """Return the place of an error, 'recipe.yaml:3:1', as far as the parser reports it."""
    if isinstance(error, ReaderError):  # a character that YAML does not allow
        prefix = text[: error.position]
        return f"{name}:{prefix.count(chr(10)) + 1}:{len(prefix) - prefix.rfind(chr(10))}"
    mark = getattr(error, "problem_mark", None)
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


def _reason(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]


def _start(node: yaml.Node) -> tuple[int, int]:
    """Return line and column of a node, counted from 1."""
    return node.start_mark.line + 1, node.start_mark.column + 1


def nearest(places: Mapping[Place, tuple[int, int]], path: Place) -> tuple[int, int]:
    """Return the place of a path, or of its innermost part that has one."""
    while path not in places:
        path = path[:-1]
    return places[path]
