"""The passes, one file per algorithm; the file's name is the key in a recipe. Nothing is registered by hand."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from compress.api.passes import Pass


def find_passes() -> dict[str, type[Pass]]:
    """Every algorithm of this folder by its key.

    The class of a file is the one whose name, in lower case, is the file's name without underscores.
    """
    found: dict[str, type[Pass]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        wanted = info.name.replace("_", "")
        for name, member in inspect.getmembers(module, inspect.isclass):
            if name.lower() == wanted and issubclass(member, Pass) and member.__module__ == module.__name__:
                found[info.name] = member
    return found


PASSES: dict[str, type[Pass]] = find_passes()
