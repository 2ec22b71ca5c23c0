"""Safetensors files: the shards of a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from compress.checkpoint.containers.files import atomic, file_sha256
from compress.numerics.dtypes import bytes_of

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


def shard_name(number: int, count: int) -> str:
    """The name of shard `number` (from 1) of `count`, as transformers writes it."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_streamed(path: Path, headers: Mapping[str, Header], tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Write tensors atomically in safetensors, one at a time; returns the file's sha256.

    Args:
        headers: dtype and shape of every tensor by name.
        tensors: (name, tensor) in any order; each may be freed when the next one is asked for.

    Raises:
        SaveError: if writing fails.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(headers, key=lambda name: (-headers[name].bits, name)):  # every tensor begins at whole numbers
        header, begin = headers[name], offset
        offset += header.size_bytes
        entries[name] = {"dtype": header.dtype, "shape": list(header.shape), "data_offsets": [begin, offset]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with atomic(path) as part, part.open("r+b") as file:
        file.write(len(text).to_bytes(ALIGNMENT, "little") + text)
        start = ALIGNMENT + len(text)
        file.truncate(start + offset)
        for name, tensor in tensors:
            begin, end = entries[name]["data_offsets"]
            assert tensor.nbytes == end - begin, f"{name} is not as its header says"
            file.seek(start + begin)
            file.write(bytes_of(tensor).numpy().data)
    return file_sha256(path)


def write_shard(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors atomically in safetensors; returns the file's sha256."""
    with atomic(path) as part:
        save_file(tensors, part, metadata={"format": "pt"})
    return file_sha256(path)
