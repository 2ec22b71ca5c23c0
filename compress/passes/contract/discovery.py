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
    """Return whether a value is a class. In Python 3.10, `dict[str, int]` is an instance of type, but no class."""
    return isinstance(value, type) and get_origin(value) is None


def classes_by_file(package: str, path: Iterable[str], base: type[T], suffix: str = "") -> dict[str, type[T]]:
    """Find the subclasses of `base` in the files of a package. Files without one are skipped.

    Args:
        package: Dotted name of the package.
        path: Its `__path__`.
        base: The class whose subclasses are found.
        suffix: End of the name of every class, after the name of its file.

    Returns:
        The classes by file name.

    Raises:
        ImportError: for a file whose subclasses are all called otherwise than the file.
    """
    classes: dict[str, type[T]] = {}
    for info in pkgutil.iter_modules(path):
        member = class_of_file(importlib.import_module(f"{package}.{info.name}"), info.name, base, suffix)
        if member is not None:
            classes[info.name] = member
    return classes


def class_of_file(module: ModuleType, name: str, base: type[T], suffix: str = "") -> type[T] | None:
    """Find the subclass of `base` that is called like a file: the file's name without underscores, in any capitals.

    Args:
        module: The imported file.
        name: Name of the file.
        base: The class whose subclass is found.
        suffix: End of the name of the class.

    Returns:
        None for a file that defines no subclass of `base`.

    Raises:
        ImportError: if all subclasses have other names.
    """
    members = {
        member.__name__: member
        for _, member in inspect.getmembers(module, is_class)
        if issubclass(member, base) and member is not base and member.__module__ == module.__name__
    }
    title = "".join(part.capitalize() for part in name.split("_")) + suffix
    match = next((member for key, member in members.items() if key.lower() == title.lower()), None)
    if match is None and members:
        raise ImportError(
            f"{name}.py defines {', '.join(members)}, but a file holds one class that is called like the file; "
            f"call the class {title}, or rename the file"
        )
    return match
