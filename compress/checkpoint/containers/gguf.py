"""GGUF files: one file with all tensors of a model, its hyperparameters and its vocabulary, as llama.cpp reads it.

The `gguf` package of the format's owners writes and parses the file. Tensors have the names of llama.cpp. The key
`compress.tensors` lists, for each tensor that belongs to the model, its name in transformers and the change of its
values, so that the file also replaces the safetensors of a checkpoint (`GGUFTensors`). Blocks that are alike share an
entry, with * for their number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.checkpoint.blocks import BLOCK_TYPES
from compress.checkpoint.containers.files import atomic, file_sha256
from compress.checkpoint.containers.gguf_header import open_reader
from compress.checkpoint.containers.safetensors import Header

FILE = "model.gguf"
"""The file in the folder of a checkpoint."""
INDEX = "compress.tensors"
SIDECAR = "gguf_tensors.json"
"""A file in the same folder, in place of `INDEX`, which llama.cpp copies when it quantizes a file."""
LARGEST_INDEX = 64 << 20
"""Bytes of `SIDECAR`."""
BLOCKS = "_blocks"
"""The end of the name of a tensor whose blocks are read as bytes."""
DENSE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Entry:
    """A tensor of the file that belongs to the model.

    name: in transformers; with `BLOCKS` at its end if it is read as bytes. heads: see `arranged`. shift: added to the
    values in the file.
    """

    name: str
    heads: int | None = None
    shift: float = 0


NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a block in the name of a tensor."""


def packed_index(entries: Mapping[str, Entry]) -> str:
    """Return the index as text: entries by the name in the file, one for all blocks alike, without defaults."""
    packed: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        values = {key: value for key, value in asdict(entry).items() if key == "name" or value}
        shared = values | {"name": NUMBER.sub("*", entry.name, count=1)}
        alike = NUMBER.findall(name)[:1] == NUMBER.findall(entry.name)[:1] != []
        if not alike or packed.setdefault(NUMBER.sub("*", name, count=1), shared) != shared:
            packed[name] = values
    return json.dumps(packed, separators=(",", ":"))


def entry_of(index: Mapping[str, Any], name: str) -> Entry | None:
    """The entry of a tensor of the file in an index; None for a tensor that does not belong to the model."""
    if name in index:
        return Entry(**index[name])
    numbers, shared = NUMBER.findall(name), index.get(NUMBER.sub("*", name, count=1))
    if not numbers or shared is None:
        return None
    return Entry(**shared | {"name": shared["name"].replace("*", numbers[0], 1)})


@dataclass(frozen=True)
class Stored:
    """A tensor to write: its name in the file, its entry in the index, its bytes by row, and how to read them."""

    name: str
    entry: Entry | None
    type: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@lru_cache(maxsize=4)
def _order(rows: int, heads: int) -> Tensor:
    """The order in the file of rows that are rotated in pairs: of each head row i and row i of its second half."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


def arranged(tensor: Tensor, heads: int | None) -> Tensor:
    """The rows of a tensor in the order of the file. heads: the heads whose rows are rotated in pairs, or None."""
    return tensor if heads is None else tensor[_order(tensor.shape[0], heads)]


def rearranged(tensor: Tensor, heads: int | None) -> Tensor:
    """The inverse of `arranged`."""
    return tensor if heads is None else tensor[_order(tensor.shape[0], heads).argsort()]


def write_gguf(path: Path, architecture: str, metadata: Iterable[tuple[str, Any]], tensors: Iterable[Stored]) -> str:
    """Write a file atomically, one tensor in memory at a time; returns its sha256.

    metadata: values by full key: str, bool, int, float, or a list of str, int or float.
    """
    import gguf  # an optional dependency

    tensors = list(tensors)
    with atomic(path) as part:
        writer = gguf.GGUFWriter(part, architecture)
        for key, value in metadata:
            _add(writer, key, value)
        writer.add_string(
            INDEX, packed_index({tensor.name: tensor.entry for tensor in tensors if tensor.entry is not None})
        )
        for tensor in tensors:
            kind = gguf.GGMLQuantizationType[tensor.type]
            block = BLOCK_TYPES.get(tensor.type)
            dtype = np.dtype({"F32": "float32", "F16": "float16", "BF16": "uint16"}.get(tensor.type, "uint8"))
            shape = tensor.shape if block is None else (*tensor.shape[:-1], block.row_bytes(tensor.shape[-1]))
            size = int(np.prod(shape)) * dtype.itemsize
            writer.add_tensor_info(tensor.name, shape, dtype, size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            values = tensor.read().contiguous()
            writer.write_tensor_data(
                values.view(torch.uint8).numpy() if values.dtype == torch.bfloat16 else values.numpy()
            )
        writer.close()
    return file_sha256(path)


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a value under a key, with the type that llama.cpp expects."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


class GGUFTensors:
    """The tensors of a file that `write_gguf` wrote, by their names in transformers, as `MappedTensors` reads them.

    Codes are read as the bytes of their blocks; other tensors that were rounded are dequantized.

    Attributes:
        headers: dtype and shape of every tensor.

    Raises:
        ValueError: for a file of another program without `SIDECAR`.
        Exception: errors of the gguf package for a damaged file.
    """

    def __init__(self, path: Path) -> None:
        reader = open_reader(path)
        index = self._index(path, reader.get_field(INDEX))
        tensors = ((entry_of(index, tensor.name), tensor) for tensor in reader.tensors)
        self._tensors = {entry.name: (entry, tensor) for entry, tensor in tensors if entry is not None}
        self.headers = {name: self._header(name) for name in self._tensors}

    @staticmethod
    def _index(path: Path, field: Any) -> Mapping[str, Any]:
        beside = path.parent / SIDECAR
        if not beside.exists() and field is None:
            raise ValueError("it was not written by compress; give the file itself as the model")
        if beside.exists() and beside.stat().st_size > LARGEST_INDEX:
            raise ValueError(f"{SIDECAR} has more than {LARGEST_INDEX >> 20} MiB")
        try:
            index = json.loads(beside.read_text(encoding="utf-8") if beside.exists() else field.contents())
        except RecursionError as error:
            raise ValueError("its names of tensors are nested too deeply") from error
        if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
            raise ValueError("its names of tensors are no JSON object of objects")
        return index

    def _tensor(self, name: str) -> Tensor:
        """Return a tensor in the order of the model."""
        entry, stored = self._tensors[name]
        kind = stored.tensor_type.name
        if kind in BLOCK_TYPES:
            tensor = torch.from_numpy(np.array(stored.data)).flatten(0, -2)
            if not name.endswith(BLOCKS):
                return BLOCK_TYPES[kind].decode(tensor, int(stored.shape[0])).dense(torch.float32)
        else:
            dtype = next(dtype for dtype, stated in DENSE.items() if stated == kind)
            values = torch.from_numpy(np.array(stored.data))
            tensor = values.view(dtype).reshape(tuple(reversed([int(n) for n in stored.shape])))
        tensor = rearranged(tensor, entry.heads)
        return tensor - entry.shift if entry.shift else tensor

    def get_tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors by name."""
        return {name: self._tensor(name) for name in names}

    def ask(self, names: Sequence[str]) -> None:
        """Do nothing: `MappedTensors.ask` asks for pages, and tensors of this file are copies."""

    def _header(self, name: str) -> Header:
        _, stored = self._tensors[name]
        shape, kind = tuple(reversed([int(n) for n in stored.shape])), stored.tensor_type.name
        if name.endswith(BLOCKS):
            return Header("U8", (shape[0], BLOCK_TYPES[kind].row_bytes(shape[1])))
        return Header("F32" if kind in BLOCK_TYPES else kind, shape)


@lru_cache(maxsize=2)
def _opened(path: Path, size: int, changed: int) -> GGUFTensors:
    return GGUFTensors(path)


def open_gguf(path: Path) -> GGUFTensors:
    """Open a file; parsed once as long as it does not change. Raises as `GGUFTensors`, also for a missing file."""
    status = path.stat()
    return _opened(path, status.st_size, status.st_mtime_ns)
