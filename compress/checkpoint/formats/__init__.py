"""Disk formats of compressed layers; the top of each file specifies its format.

A format is imported when it is looked up, so that the names alone, and what formats share, import nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.checkpoint.formats.base import Format

CLASSES = {
    "compressed-tensors": "CompressedTensors",
    "native": "Native",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "BitsAndBytes",
    "gguf": "GGUF",
    "mlx": "MLX",
    "dense": "Dense",
}
"""The class of every format by its name in a recipe, which is that of its file with '-' for '_'."""


class Formats(Mapping[str, "Format"]):
    """The formats of `CLASSES` by name; each is made once."""

    def __init__(self) -> None:
        self._made: dict[str, Format] = {}

    def __getitem__(self, name: str) -> Format:
        if name not in self._made:
            title = CLASSES[name]
            self._made[name] = getattr(import_module(f"{__name__}.{name.replace('-', '_')}"), title)()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(CLASSES)

    def __len__(self) -> int:
        return len(CLASSES)

    def __contains__(self, name: object) -> bool:
        return name in CLASSES


FORMATS = Formats()
"""Every format by its name in a recipe."""
