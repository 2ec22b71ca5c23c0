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
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.checkpoint.blocks import BLOCK_TYPES
from compress.checkpoint.containers.files import atomic, file_sha256
from compress.checkpoint.containers.gguf_header import FILE, open_reader
from compress.checkpoint.containers.safetensors import Header

INDEX = "compress.tensors"
CONFIG = "compress.config"
"""The key of the model's configuration as JSON; from the other keys, transformers makes that of few architectures."""
SIDECAR = "gguf_tensors.json"
"""A file in the same folder, in place of `INDEX`, which llama.cpp copies when it quantizes a file."""
LARGEST_INDEX = 64 << 20
"""Bytes of `SIDECAR`."""
BLOCKS = "_blocks"
"""The end of the name of a tensor whose blocks are read as bytes."""
CUBE = 3  # axes of stacked matrices
STACKS = 2, CUBE  # axes of the biases and the matrices of all experts
PAIR = 2
MEMBER = "#"
"""The place of the number of an expert in the name of an entry."""
DENSE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@lru_cache(maxsize=4)
def _pairs(rows: int, heads: int) -> Tensor:
    """The order in the file of rows that are rotated in pairs: of each head row i and row i of its second half."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


@lru_cache(maxsize=4)
def _by_kind(rows: int, groups: int, heads: int) -> Tensor:
    """The order in the file of the rows of a fused linear: all queries, all keys, all values.

    In the model they are groups of so many heads: some of queries, one of keys and one of values.
    """
    numbers = torch.arange(rows).view(groups, heads, -1)
    return torch.cat([numbers[:, :-2].flatten(), numbers[:, -2].flatten(), numbers[:, -1].flatten()])


@dataclass(frozen=True)
class Entry:
    """A tensor of the file that belongs to the model, or one for each expert.

    Attributes:
        name: in transformers; with `BLOCKS` at its end if it is read as bytes. `MEMBER` is the number of an expert.
        heads: heads whose rows are rotated in pairs, so that the file has them in another order; None: none.
        shift: added to the values in the file.
        groups: groups of heads of a fused linear, whose rows the file orders by queries, keys and values; None: none.
        group_heads: heads of each group.
        transposed: whether the file has rows and columns exchanged.
        axis: an axis of length 1 of the tensor in the model, which the file lacks; None: none.
        members: the number of experts whose tensors are stacked; None: it is one tensor.
        stacked: equal parts of the rows, which the file stacks as matrices of their own; None: the rows are one matrix.
            `transposed` then exchanges rows and columns of each of them.
        rows: (first, last + 1) of the rows of each such part that are in this tensor; others are in other tensors.
        stride: instead of `stacked`, `rows` are of each run of so many rows, and the file has them as one matrix.
    """

    name: str
    heads: int | None = None
    shift: float = 0
    groups: int | None = None
    group_heads: int | None = None
    transposed: bool = False
    axis: int | None = None
    members: int | None = None
    stacked: int | None = None
    rows: Sequence[int] = ()
    stride: int | None = None

    @property
    def is_divided(self) -> bool:
        """Whether other tensors of the file have the other rows of the tensor of the model."""
        return self.stacked is not None or self.stride is not None

    @property
    def names(self) -> list[str]:
        """The names in transformers of all its tensors, in the order in which they are stacked."""
        return (
            [self.name.replace(MEMBER, str(number)) for number in range(self.members)] if self.members else [self.name]
        )

    def check(self, shape: Sequence[int]) -> None:
        """Check that a tensor of the file can be brought to the form of the model.

        Args:
            shape: of the tensor in the file, without the axis of the experts.

        Raises:
            ValueError: for an entry that does not fit the shape.
        """
        rows, counts = shape[0] if self.axis != 0 else 1, [1]
        if self.heads is not None:
            counts.append(2 * self.heads)
        if self.groups is not None and self.group_heads is not None:
            counts.append(self.groups * self.group_heads)
        is_valid = isinstance(self.name, str) and all(isinstance(n, int) and n > 0 and rows % n == 0 for n in counts)
        is_valid = is_valid and (self.stacked is None or self._fits_parts(shape))
        is_valid = is_valid and (self.stride is None or self._fits_runs(shape))
        if not is_valid or self.axis not in (None, 0, 1) or not isinstance(self.shift, int | float):
            raise ValueError(f"the entry of {str(self.name)[:200]} does not fit a tensor of {list(shape)}")

    @property
    def _has_rows(self) -> bool:
        numbers = self.rows if isinstance(self.rows, list | tuple) else ()
        return len(numbers) == PAIR and all(isinstance(n, int) and n >= 0 for n in numbers)

    def _fits_parts(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of the file can hold `rows` of each of the `stacked` parts, as numbers."""
        is_cube = len(shape) == CUBE and shape[0] == self.stacked and self.axis is None
        if not is_cube or not self._has_rows or self.name.endswith(BLOCKS):
            return False
        return self.rows[1] - self.rows[0] == shape[2 if self.transposed else 1]

    def _fits_runs(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of the file can hold `rows` of each run of `stride` rows."""
        others = self.heads, self.groups, self.axis, self.stacked, self.shift or None, self.transposed or None
        if not isinstance(self.stride, int) or not self._has_rows or any(other is not None for other in others):
            return False
        return self.rows[0] < self.rows[1] <= self.stride and shape[0] % (self.rows[1] - self.rows[0]) == 0

    def to_file(self, tensor: Tensor) -> Tensor:
        """The tensor in the form of the file, of a tensor of the model: rows of numbers or of bytes."""
        if self.stacked is not None:
            parts = tensor.unflatten(0, (self.stacked, -1))[:, self.rows[0] : self.rows[1]]
            return parts.mT if self.transposed else parts
        if self.stride is not None:
            return tensor.unflatten(0, (-1, self.stride))[:, self.rows[0] : self.rows[1]].flatten(0, 1)
        tensor = tensor.T if self.transposed else tensor
        order = self._order(tensor.shape[0])
        tensor = tensor if order is None else tensor[order]
        tensor = tensor if self.axis is None else tensor.squeeze(self.axis)
        return tensor + self.shift if self.shift else tensor

    def to_model(self, tensor: Tensor) -> Tensor:
        """The inverse of `to_file`; if `is_divided`, the rows of each part or run, [parts, rows, ...]."""
        if self.stacked is not None:
            return tensor.mT if self.transposed else tensor
        if self.stride is not None:
            return tensor.unflatten(0, (-1, self.rows[1] - self.rows[0]))
        tensor = tensor - self.shift if self.shift else tensor
        tensor = tensor if self.axis is None else tensor.unsqueeze(self.axis)
        order = self._order(tensor.shape[0])
        tensor = tensor if order is None else tensor[order.argsort()]
        return tensor.T if self.transposed else tensor

    def shape_in_file(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in the file of one tensor of the model."""
        if self.stacked is not None:
            height, width = self.rows[1] - self.rows[0], shape[-1]
            return (self.stacked, width, height) if self.transposed else (self.stacked, height, width)
        if self.stride is not None:
            return (shape[0] // self.stride * (self.rows[1] - self.rows[0]), *shape[1:])
        sizes = list(reversed(shape)) if self.transposed else list(shape)
        return tuple(size for axis, size in enumerate(sizes) if axis != self.axis)

    def shape_in_model(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The inverse of `shape_in_file`; if `is_divided`, of the rows that the tensor has."""
        if self.stacked is not None:
            height, width = shape[:0:-1] if self.transposed else shape[1:]
            return self.stacked * height, width
        sizes = list(shape) if self.axis is None else [*shape[: self.axis], 1, *shape[self.axis :]]
        return tuple(reversed(sizes)) if self.transposed else tuple(sizes)

    def _order(self, rows: int) -> Tensor | None:
        if self.heads is not None:
            return _pairs(rows, self.heads)
        if self.groups is not None and self.group_heads is not None:
            return _by_kind(rows, self.groups, self.group_heads)
        return None


DEFAULTS = {field.name: field.default for field in fields(Entry)}
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a block in the name of a tensor."""


def packed_index(entries: Mapping[str, Entry]) -> str:
    """Return the index as text: entries by the name in the file, one for all blocks alike, without defaults."""
    packed: dict[str, dict[str, Any]] = {}
    for name, entry in entries.items():
        values = {key: value for key, value in asdict(entry).items() if value != DEFAULTS[key]}
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


def write_gguf(path: Path, architecture: str, metadata: Iterable[tuple[str, Any]], tensors: Iterable[Stored]) -> str:
    """Write a file atomically, one tensor in memory at a time; returns its sha256.

    metadata: values by full key: str, bool, int, float, or a list of str, int or float.
    """
    tensors = list(tensors)
    with atomic(path) as part:
        writer = _begun(part, architecture, metadata, tensors)
        for tensor in tensors:
            values = tensor.read().contiguous()
            writer.write_tensor_data(
                values.view(torch.uint8).numpy() if values.dtype == torch.bfloat16 else values.numpy()
            )
        writer.close()
    return file_sha256(path)


def header_bytes(architecture: str, metadata: Iterable[tuple[str, Any]], tensors: Sequence[Stored]) -> int:
    """Return the bytes of the file that `write_gguf` writes before the first tensor."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        _begun(path, architecture, metadata, tensors).close()
        return path.stat().st_size


def _begun(path: Path, architecture: str, metadata: Iterable[tuple[str, Any]], tensors: Sequence[Stored]) -> Any:
    """Return the writer of a file that has everything but the values of its tensors."""
    import gguf  # an optional dependency

    writer = gguf.GGUFWriter(path, architecture)
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
    return writer


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
        self._places: dict[str, list[_Place]] = {}
        for tensor in reader.tensors:
            entry = entry_of(index, tensor.name)
            if entry is None:
                continue
            members = entry.members or 1
            if entry.members is not None and (len(tensor.shape) not in STACKS or int(tensor.shape[-1]) != members):
                raise ValueError(f"{tensor.name} does not hold {members} experts, as its entry states")
            entry.check(tuple(reversed([int(n) for n in tensor.shape]))[0 if entry.members is None else 1 :])
            for number, name in enumerate(entry.names):
                place = _Place(entry, tensor, None if entry.members is None else number)
                self._places.setdefault(name, []).append(place)
        for name, places in self._places.items():
            self._places[name] = _in_order(name, places)
        self.headers = {name: self._header(name) for name in self._places}

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
        """Return a tensor in the form of the model."""
        parts = [place.tensor(name.endswith(BLOCKS)) for place in self._places[name]]
        return torch.cat(parts, dim=1).flatten(0, 1) if self._places[name][0].entry.is_divided else parts[0]

    def get_tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors by name."""
        return {name: self._tensor(name) for name in names}

    def ask(self, names: Sequence[str]) -> None:
        """Do nothing: `MappedTensors.ask` asks for pages, and tensors of this file are copies."""

    def _header(self, name: str) -> Header:
        headers = [place.header(name.endswith(BLOCKS)) for place in self._places[name]]
        if len({(header.dtype, *header.shape[1:]) for header in headers}) > 1:
            raise ValueError(f"the tensors of {name[:200]} are of several dtypes or widths")
        rows = sum(header.shape[0] for header in headers) if len(headers) > 1 else headers[0].shape[0]
        return Header(headers[0].dtype, (rows, *headers[0].shape[1:]))


@dataclass(frozen=True)
class _Place:
    """Where a file has a tensor of the model, or some of its rows.

    Attributes:
        entry: how it is stored.
        stored: the tensor of the file, of the gguf package.
        member: the number of the expert in it; None: it is one tensor.
    """

    entry: Entry
    stored: Any
    member: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file."""
        shape = tuple(reversed([int(n) for n in self.stored.shape]))
        return shape if self.member is None else shape[1:]

    def tensor(self, as_blocks: bool) -> Tensor:
        """Return the values in the form of the model: bytes of blocks, or numbers."""
        kind, shape = self.stored.tensor_type.name, self.shape
        data = torch.from_numpy(np.array(self.stored.data if self.member is None else self.stored.data[self.member]))
        if kind in BLOCK_TYPES:
            tensor = data.reshape(*shape[:-1], -1)
            if not as_blocks:
                matrix = tensor.reshape(-1, tensor.shape[-1])
                tensor = BLOCK_TYPES[kind].decode(matrix, shape[-1]).dense(torch.float32).reshape(shape)
        else:
            dtype = next(dtype for dtype, stated in DENSE.items() if stated == kind)
            tensor = data.view(dtype).reshape(shape)
        return self.entry.to_model(tensor)

    def header(self, as_blocks: bool) -> Header:
        """Return dtype and shape of `tensor`; of rows of several parts, of all of them below each other."""
        shape, kind = self.shape, self.stored.tensor_type.name
        if as_blocks:
            return Header("U8", self.entry.shape_in_model((*shape[:-1], BLOCK_TYPES[kind].row_bytes(shape[-1]))))
        return Header("F32" if kind in BLOCK_TYPES else kind, self.entry.shape_in_model(shape))


def _in_order(name: str, places: Sequence[_Place]) -> list[_Place]:
    """Return the places of a tensor in the order of their rows. Raises ValueError if they do not hold all of them."""
    if len(places) == 1 and not places[0].entry.is_divided:
        return list(places)
    ordered, end = sorted(places, key=lambda place: tuple(place.entry.rows)), 0
    first = ordered[0].entry
    for place in ordered:
        entry = place.entry
        alike = (entry.stacked, entry.stride) == (first.stacked, first.stride)
        if not entry.is_divided or not alike or entry.rows[0] != end:
            raise ValueError(f"the tensors of {name[:200]} do not hold each of its rows once")
        end = entry.rows[1]
    heights = {place.shape[0] * (first.stride or 0) // (place.entry.rows[1] - place.entry.rows[0]) for place in ordered}
    if first.stride is not None and (end != first.stride or len(heights) > 1):
        raise ValueError(f"the tensors of {name[:200]} do not hold each of its rows once")
    return ordered


@lru_cache(maxsize=2)
def _opened(path: Path, size: int, changed: int) -> GGUFTensors:
    return GGUFTensors(path)


def open_gguf(path: Path) -> GGUFTensors:
    """Open a file; parsed once as long as it does not change. Raises as `GGUFTensors`, also for a missing file."""
    status = path.stat()
    return _opened(path, status.st_size, status.st_mtime_ns)
