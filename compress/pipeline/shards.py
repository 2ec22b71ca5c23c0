"""The entries of the shards of a checkpoint in its manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.checkpoint.containers.safetensors import write_shard
from compress.layers.linear import CompressedLinear


@dataclass
class ShardEntry:
    """One finished shard.

    file: its name. sha256: of the file. names: of its tensors. digests: sha256 of the codes per layer. schemes: the
    storage scheme per layer. results, journal: lines for the report. caches: {scheme, sha256} per attention module with
    rounded keys and values. masked: the linears that have a mask.
    """

    file: str
    sha256: str
    names: list[str]
    size_bytes: int
    digests: dict[str, str] = field(default_factory=dict)
    schemes: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)
    caches: dict[str, dict[str, Any]] = field(default_factory=dict)
    masked: list[str] = field(default_factory=list)


def record(entry: ShardEntry, name: str, layer: CompressedLinear) -> None:
    """Add a compressed layer to the entry of its shard."""
    if layer.positions is not None:
        entry.masked.append(name)
    if not layer.scheme.plain:
        entry.digests[name] = layer.sha256()
        entry.schemes[name] = layer.scheme.to_json()


def write_entry(path: Path, tensors: dict[str, Tensor]) -> ShardEntry:
    """Write a shard and return its entry in the manifest."""
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    return ShardEntry(path.name, write_shard(path, tensors), list(tensors), size)
