"""The passes, one file per algorithm in folders by kind; the file's name is the key in a recipe.

Nothing is registered by hand: `PASSES` finds the files, and imports a pass when it is used.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.passes.contract.discovery import class_of_file

if TYPE_CHECKING:
    from compress.passes.contract.passes import Pass

KINDS = ("quantize", "prepare", "prune", "reshape", "train", "cache")
"""The folders of passes, by what they do to a model."""


class Registry(Mapping[str, "type[Pass]"]):
    """The passes of this package by key, in alphabetical order; each is imported when it is looked up."""

    def __init__(self) -> None:
        folder = Path(__file__).parent
        kinds = {file.name: kind for kind in KINDS for file in pkgutil.iter_modules([str(folder / kind)])}
        self._kinds = dict(sorted(kinds.items()))
        self._classes: dict[str, type[Any]] = {}

    def __getitem__(self, key: str) -> type[Pass]:
        if key not in self._classes:
            module = import_module(f"{__name__}.{self._kinds[key]}.{key}")
            pass_class: type[Any] | None = class_of_file(module, key, object)
            assert pass_class is not None, f"{key}.py defines no class"
            self._classes[key] = pass_class
        return self._classes[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def __contains__(self, key: object) -> bool:
        return key in self._kinds

    def kind(self, key: str) -> str:
        """Return the folder of a pass, such as 'quantize'."""
        return self._kinds[key]

    def of_kind(self, kind: str) -> list[str]:
        """Return the keys of the passes in a folder."""
        return [key for key in self if self._kinds[key] == kind]


PASSES = Registry()
"""The class of every pass by its key."""
