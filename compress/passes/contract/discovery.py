"""Discovery by file name: each file of a package holds one class, and the file's name is the key of the class."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from types import ModuleType
from typing import TypeGuard, TypeVar, get_origin

T = TypeVar("T")


def is_class(value: object) -> TypeGuard[type]:
    """Whether a value is a class. Python 3.10 also takes `dict[str, int]` for one, until `issubclass` is asked."""
    return isinstance(value, type) and get_origin(value) is None


def classes_by_file(package: str, path: Iterable[str], base: type[T]) -> dict[str, type[T]]:
    """The subclasses of `base` in the files of a package, by file name.

    package: the dotted name; path: its `__path__`. Files without a subclass of `base` are skipped.

    Raises ImportError for a file whose subclasses are all called otherwise than the file.
    """
    found: dict[str, type[T]] = {}
    for info in pkgutil.iter_modules(path):
        member = class_of_file(importlib.import_module(f"{package}.{info.name}"), info.name, base)
        if member is not None:
            found[info.name] = member
    return found


def class_of_file(module: ModuleType, name: str, base: type[T]) -> type[T] | None:
    """The subclass of `base` that is called like a file: the file's name without underscores, in any capitals.

    Returns None for a file that defines no subclass of `base`. Raises ImportError if all have other names.
    """
    own = {
        member.__name__: member
        for _, member in inspect.getmembers(module, is_class)
        if issubclass(member, base) and member is not base and member.__module__ == module.__name__
    }
    found = next((member for title, member in own.items() if title.lower() == name.replace("_", "")), None)
    if found is None and own:
        wanted = "".join(part.capitalize() for part in name.split("_"))
        raise ImportError(
            f"{name}.py defines {', '.join(own)}, but a file holds one class that is called like the file; "
            f"call the class {wanted}, or rename the file"
        )
    return found
