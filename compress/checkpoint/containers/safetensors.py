"""Safetensors files: the shards of a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from compress.checkpoint.containers.files import atomic, file_sha256

INDEX = "model.safetensors.index.json"
"""The file that names the file of every tensor."""


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


def write_shard(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors atomically in safetensors; returns the file's sha256."""
    with atomic(path) as part:
        save_file(tensors, part, metadata={"format": "pt"})
    return file_sha256(path)
