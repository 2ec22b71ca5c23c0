"""Safetensors files: the shards of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from compress.formats.containers.files import atomic, file_sha256


def shard_name(number: int, count: int) -> str:
    """The name of shard `number` (from 1) of `count`, as transformers writes it."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_shard(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors atomically in safetensors; returns the file's sha256."""
    with atomic(path) as part:
        save_file(tensors, part, metadata={"format": "pt"})
    return file_sha256(path)
