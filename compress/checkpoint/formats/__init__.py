"""Disk formats of compressed layers; the top of each file specifies its format.

A format is imported when it is looked up, so that the names alone, and what formats share, import nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from compress.errors import did_you_mean

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
    "modelopt": "ModelOpt",
    "dense": "Dense",
}
"""The class of every format by its name in a recipe, which is that of its file with '-' for '_'."""
OWN_METHOD = "compress"
"""The `quant_method` of format native."""
STACKED = {"mxfp4": {"_blocks": "blocks", "_scales": "scales", "_bias": "bias"}}
"""By `quant_method`, the tensors that hold those of all experts: `Format.stacked`."""
ONNX, OPENVINO = RUNTIMES = ("onnx", "openvino")
"""What `compress export` writes for other programs, and nothing reads."""
READ_ONLY_CLASSES = {"fp8": "FP8", "mxfp4": "MXFP4"}
"""The class of every format of `read_only/` by the name of its file."""


class Formats(Mapping[str, "Format"]):
    """Formats by name; each is made once.

    Args:
        classes: the class of each.
        package: the package of their files.
    """

    def __init__(self, classes: Mapping[str, str], package: str) -> None:
        self._classes, self._package = classes, package
        self._made: dict[str, Format] = {}

    def __getitem__(self, name: str) -> Format:
        if name not in self._made:
            title = self._classes[name]
            self._made[name] = getattr(import_module(f"{self._package}.{name.replace('-', '_')}"), title)()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._classes


FORMATS = Formats(CLASSES, __name__)
"""Every format by its name in a recipe."""
READ_ONLY = Formats(READ_ONLY_CLASSES, f"{__name__}.read_only")
"""Every format that is read and not written."""


def format_of(method: object) -> Format | None:
    """Return the format with this `quant_method`; None without one."""
    formats = (*FORMATS.values(), *READ_ONLY.values())
    return next((f for f in formats if f.quant_method is not None and f.quant_method == method), None)


def unknown_format(name: str) -> str:
    """Return why a name is not that of a format which a checkpoint is written in, and what to write instead."""
    if name in RUNTIMES:
        return f"format {name} is no checkpoint; write another format, and then compress export --format {name}"
    return f"format {name!r} is not known{did_you_mean(name, FORMATS)}"
