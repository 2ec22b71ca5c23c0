"""Safetensors files: names of the shards of a checkpoint, and what the header of a file states. No tensor is read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import Any

from safetensors import safe_open

INDEX = "model.safetensors.index.json"
"""The file that names the file of every tensor."""
ALIGNMENT = 8  # bytes: of the length of the header, and what the length of the header is a multiple of


@dataclass(frozen=True)
class Header:
    """What a safetensors file states about a tensor. dtype: in the spelling of safetensors, such as BF16."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def floating(self) -> bool:
        """Whether it holds floats."""
        return self.dtype.startswith(("F", "BF"))

    @property
    def count(self) -> int:
        """The number of its values."""
        return prod(self.shape)

    @property
    def bits(self) -> int:
        """Return the bits of a value: the first number in the dtype's name, as in BF16 and F8_E4M3; 8 for BOOL."""
        digits = re.search(r"\d+", self.dtype)
        return 8 if digits is None else int(digits[0])

    @property
    def size_bytes(self) -> int:
        """Its bytes."""
        return self.count * self.bits // 8


Range = tuple[int, int]
"""The first byte in the file, and the byte after the last."""


def file_status(path: Path) -> os.stat_result:
    """Return the size and the times of a regular file.

    Raises:
        OSError: for a file that is missing or no regular file.
    """
    if "\0" in str(path):  # of an index; a ValueError of Python
        raise FileNotFoundError(f"no file has a null byte in its name: {path}")
    status = path.stat()
    if not S_ISREG(status.st_mode):  # safetensors would wait for a pipe without end
        raise OSError("no regular file")
    return status


def read_headers(path: Path) -> dict[str, tuple[Header, Range]]:
    """Return what a file states about each tensor, and the range of its bytes in the file.

    Raises:
        SafetensorError: for an invalid header.
        OSError: for a file that cannot be read.
    """
    file_status(path)
    with safe_open(path, framework="np") as file:  # checks the header; maps the file shared, which counts as no data
        names = list(file.keys())
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(ALIGNMENT), "little")
        entries: Mapping[str, Any] = json.loads(opened.read(length))
    start = ALIGNMENT + length
    offsets = {name: entries[name]["data_offsets"] for name in names}
    return {
        name: (Header(entries[name]["dtype"], tuple(entries[name]["shape"])), (start + begin, start + end))
        for name, (begin, end) in offsets.items()
    }
