"""Write safetensors files atomically."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from compress.checkpoint.containers.files import atomic, file_sha256, write_json
from compress.checkpoint.containers.safetensors import ALIGNMENT, INDEX, Header
from compress.numerics.dtypes import bytes_of

Headers = Mapping[str, Header]
"""What a file states about its tensors, by name."""


def shard_name(number: int, count: int) -> str:
    """The name of shard `number` (from 1) of `count`, as transformers writes it."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_streamed(path: Path, headers: Headers, tensors: Iterable[tuple[str, Tensor]]) -> str:
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


def write_index(folder: Path, file_by_name: Mapping[str, str], size_bytes: int) -> str:
    """Write the file that names the file of every tensor, and return its name.

    Args:
        folder: The folder of the shards.
        file_by_name: The file of every tensor.
        size_bytes: Bytes of all tensors.

    Raises:
        SaveError: if writing fails.
    """
    entries = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(file_by_name.items()))}
    write_json(folder / INDEX, entries)
    return INDEX
