"""Importance matrices of llama.cpp: for each matrix of a GGUF file the mean square of every input on a text.

Two forms are read (llama.cpp, tools/imatrix/imatrix.cpp); the second one is written:

    .dat    int32 number of entries; for each: int32 length and bytes of the name, int32 calls, int32 number of values,
            float32 values, the mean squares times the calls; after the last entry more on the text, which is not read
    .gguf   general.type "imatrix"; for each entry NAME.in_sum2 [inputs, experts], the sums of squares, and
            NAME.counts [1, experts], how many rows were added

The values of the experts of a matrix follow each other. A file is read entry by entry: what its header states is
compared with its size first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from compress.checkpoint.containers.files import atomic
from compress.checkpoint.containers.gguf_header import open_reader

MAGIC = b"GGUF"
SUMS, COUNTS = ".in_sum2", ".counts"
LONGEST_NAME = 1 << 10  # bytes; the names of GGUF files have at most 64


@dataclass(frozen=True)
class Squares:
    """The squares of the inputs of one matrix.

    Attributes:
        sums: sum over the rows of each expert; one row for a matrix without experts.
        counts: number of these rows.
    """

    sums: Float[Tensor, "experts in"]
    counts: Float[Tensor, " experts"]


Entries = Mapping[str, Callable[[], Float[Tensor, " values"]]]
"""Name of a matrix in a GGUF file -> the mean squares of all its experts, one after the other; read when called."""


def read_imatrix(path: Path) -> Entries:
    """Return the entries of a file in either form; parsed once as long as it does not change.

    An expert that no row reached has 1 for each input, as in llama.cpp.

    Raises:
        ValueError: for a file that is damaged or no importance matrix; a call of an entry, for values that are no
            squares.
        OSError: for a file that cannot be read.
        Exception: errors of the `gguf` package for a damaged file.
    """
    status = path.stat()
    return _read(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=2)
def _read(path: Path, size: int, changed: int) -> Entries:
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return _of_gguf(path)
        file.seek(0)
        return _of_dat(path, file, size)


def _of_gguf(path: Path) -> Entries:
    reader = open_reader(path)
    field = reader.get_field("general.type")
    if field is None or field.contents() != "imatrix":
        raise ValueError("it is a GGUF file, but no importance matrix (general.type)")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    entries: dict[str, Callable[[], Tensor]] = {}
    for name in [name.removesuffix(SUMS) for name in tensors if name.endswith(SUMS)]:
        sums, counts = tensors[name + SUMS], tensors.get(name + COUNTS)
        if counts is None or {sums.tensor_type.name, counts.tensor_type.name} != {"F32"}:
            raise ValueError(f"{name} has no counts, or its values are no float32 numbers")
        if counts.n_elements == 0 or sums.n_elements % counts.n_elements:
            raise ValueError(f"{name} has {sums.n_elements} sums for {counts.n_elements} counts")
        entries[name] = partial(_means, name, sums.data, counts.data)
    return entries


def _means(name: str, sums: np.ndarray, counts: np.ndarray) -> Float[Tensor, " values"]:
    rows = torch.from_numpy(np.array(counts, dtype=np.float32).reshape(-1, 1))
    values = torch.from_numpy(np.array(sums, dtype=np.float32)).reshape(len(rows), -1)
    return _checked(name, torch.where(rows > 0, values / rows.clamp(min=1), 1.0).flatten())


def _of_dat(path: Path, file: BinaryIO, size: int) -> Entries:
    entries: dict[str, Callable[[], Tensor]] = {}
    for _ in range(_count(file, size, 12)):
        length = _count(file, size, 1)
        if not 0 < length <= LONGEST_NAME:
            raise ValueError(f"it is no importance matrix: the name of an entry has {length} bytes")
        name = file.read(length).decode("utf-8", errors="replace")
        calls = struct.unpack("<i", file.read(4))[0] if size - file.tell() >= 4 else 0
        values = _count(file, size, 4)
        if calls < 1 or values < 1:
            raise ValueError(f"{name} has {values} values of {calls} calls")
        entries[name] = partial(_values, path, name, file.tell(), values, calls)
        file.seek(4 * values, 1)
    if not entries:
        raise ValueError("it is no importance matrix: it has no entries")
    return entries


def _count(file: BinaryIO, size: int, least: int) -> int:
    """Read a count of things that take at least so many bytes of the file each."""
    data = file.read(4)
    if len(data) < 4:
        raise ValueError("the file ends inside of an entry")
    (count,) = struct.unpack("<i", data)
    if not 0 <= count * least <= size - file.tell():
        raise ValueError(f"it states {count} entries, bytes or values, but the file has {size} bytes")
    return count


def _values(path: Path, name: str, start: int, count: int, calls: int) -> Float[Tensor, " values"]:
    values = np.fromfile(path, dtype="<f4", count=count, offset=start)
    if len(values) < count:
        raise ValueError(f"the file ends inside of {name}")
    return _checked(name, torch.from_numpy(values / np.float32(calls)))


def _checked(name: str, values: Tensor) -> Tensor:
    if not bool((values >= 0).all()) or not bool(values.isfinite().all()):
        raise ValueError(f"{name} has values that are no squares: negative or not finite")
    return values


def write_imatrix(path: Path, squares: Mapping[str, Squares], text: str, sequences: int, length: int) -> None:
    """Write a file in the GGUF form atomically.

    Args:
        path: the file.
        squares: by the names of the matrices in GGUF files.
        text: the name of the text.
        sequences: sequences of the text.
        length: tokens of each.
    """
    import gguf  # an optional dependency

    with atomic(path) as part:
        writer = gguf.GGUFWriter(part, "")  # no architecture: it holds no model
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", [text])
        writer.add_uint32("imatrix.chunk_count", sequences)
        writer.add_uint32("imatrix.chunk_size", length)
        for name, entry in sorted(squares.items()):
            writer.add_tensor(name + SUMS, entry.sums.float().contiguous().numpy())
            writer.add_tensor(name + COUNTS, entry.counts.float().reshape(-1, 1).contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
