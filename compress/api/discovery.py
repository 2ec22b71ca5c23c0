"""Discovery by file name: each file of a package holds one class, and the file's name is the key of the class."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def classes_by_file(package: str, path: Iterable[str], base: type[T]) -> dict[str, type[T]]:
    """The subclasses of `base` in the files of a package, by file name.

    package: the dotted name; path: its `__path__`. The class of a file is the one whose name, in lower case, is the
    file's name without underscores; files without such a class are skipped.
    """
    found: dict[str, type[T]] = {}
    for info in pkgutil.iter_modules(path):
        module = importlib.import_module(f"{package}.{info.name}")
        wanted = info.name.replace("_", "")
        for name, member in inspect.getmembers(module, inspect.isclass):
            if name.lower() == wanted and issubclass(member, base) and member.__module__ == module.__name__:
                found[info.name] = member
    return found
