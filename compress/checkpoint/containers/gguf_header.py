"""Check that the sizes which the header of a GGUF file states fit into the file, before the `gguf` package reads it.

The package makes an object for each value of an array and each tensor, as many as the header says (gguf.md of the
format's owners, section "File Structure").
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

FILE = "model.gguf"
"""The file in the folder of a checkpoint."""

MOST_VALUES = 1 << 22
"""Values of all arrays together; a vocabulary of 256,000 tokens with its merges has about 1.3 million."""
MOST_DIMENSIONS = 8
DEEPEST = 4  # arrays in arrays
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number by its type."""
TEXT, ARRAY = 8, 9


def open_reader(path: Path) -> Any:
    """Return the `GGUFReader` of a file.

    Raises:
        ValueError: for a header that states more than the file holds.
        Exception: errors of the `gguf` package for a damaged file.
    """
    from gguf import GGUFReader  # an optional dependency

    with path.open("rb") as file:
        _Header(file, path.stat().st_size).check()
    return GGUFReader(path)


def architecture_of_file(path: Path) -> str | None:
    """Return `general.architecture` of a file, which is usually the first value; None if the file does not state it.

    Raises:
        ValueError: for a header that states more than the file holds.
    """
    with path.open("rb") as file:
        return _Header(file, path.stat().st_size).text(b"general.architecture")


class _Header:
    """A header that is read once, from its begin to its end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self._order, self._values = file, size, "<", 0

    def check(self) -> None:
        """Read all values and all tensors."""
        tensor_count, value_count = self._counts()
        for _ in range(value_count):
            self._skip(self._count("Q", 1))
            self._value(self._number("I"), 0)
        for _ in range(tensor_count):
            self._skip(self._count("Q", 1))
            dimensions = self._number("I")
            if dimensions > MOST_DIMENSIONS:
                raise ValueError(f"a tensor of its header has {dimensions} dimensions")
            weights = math.prod(self._number("Q") for _ in range(dimensions))
            if weights > 8 * self._size:  # the smallest weights have more than one bit
                raise ValueError(f"a tensor of its header has {weights} weights, but the file has {self._size} bytes")
            self._skip(12)

    def text(self, key: bytes) -> str | None:
        """Read values up to a key, and return its text; None without the key, or if it is no text."""
        _, value_count = self._counts()
        for _ in range(value_count):
            is_key, kind = self._file.read(self._count("Q", 1)) == key, self._number("I")
            if is_key:
                data = self._file.read(self._count("Q", 1)) if kind == TEXT else None
                return None if data is None else data.decode("utf-8", "replace")
            self._value(kind, 0)
        return None

    def _counts(self) -> tuple[int, int]:
        """Read the numbers of tensors and of values."""
        self._skip(4)
        if self._number("I") & 0xFFFF == 0:  # a version in the other order of bytes
            self._order = ">"
        return self._count("Q", 24), self._count("Q", 13)

    def _value(self, kind: int, depth: int) -> None:
        if kind == TEXT:
            self._skip(self._count("Q", 1))
        elif kind == ARRAY:
            inner, least = self._number("I"), 8
            if depth > DEEPEST:
                raise ValueError(f"its header has arrays in more than {DEEPEST} levels")
            count = self._count("Q", WIDTHS.get(inner, least))
            self._values += count
            if self._values > MOST_VALUES:
                raise ValueError(f"the arrays of its header have more than {MOST_VALUES} values")
            if inner in WIDTHS:
                self._skip(count * WIDTHS[inner])
            else:
                for _ in range(count):
                    self._value(inner, depth + 1)
        elif kind in WIDTHS:
            self._skip(WIDTHS[kind])
        else:
            raise ValueError(f"its header has a value of the unknown type {kind}")

    def _number(self, code: str) -> int:
        form = self._order + code
        data = self._file.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            raise ValueError("the file ends inside of its header")
        return struct.unpack(form, data)[0]

    def _count(self, code: str, least: int) -> int:
        """Read a count of things that take at least so many bytes of the file each."""
        count = self._number(code)
        if count * least > self._size - self._file.tell():
            raise ValueError(f"its header states {count} values or bytes, but the file has {self._size} bytes")
        return count

    def _skip(self, count: int) -> None:
        self._file.seek(count, 1)
