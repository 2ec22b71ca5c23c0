"""Read tensors of a safetensors file as views of memory-mapped ranges of the file.

safetensors maps a file as a whole, privately and writable. Systems count such a mapping as data of the process, read or
not, so a file larger than the limit of a process (RLIMIT_DATA) cannot be opened. Here only the ranges of the requested
tensors are mapped, and only as long as one of the tensors exists.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from torch import Tensor

from compress.checkpoint.containers.safetensors import Range, file_status, read_headers
from compress.numerics.dtypes import SAFETENSORS

GAP = 1 << 20  # tensors at most this many bytes apart share one mapping: few mappings, little that is not needed


def open_mapped(path: Path) -> MappedTensors:
    """Open a file; its header is parsed once as long as it does not change. Raises as `MappedTensors`."""
    status = file_status(path)
    return _opened(path, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=256)
def _opened(path: Path, *state: int) -> MappedTensors:
    return MappedTensors(path)


class MappedTensors:
    """The tensors of one file.

    A tensor may be written to: the process then has a copy of the page, and the file does not change.

    Attributes:
        headers: dtype and shape of every tensor.

    Raises:
        SafetensorError: for an invalid header.
        OSError: for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        header = read_headers(path)
        self._path = path
        self.headers = {name: stated for name, (stated, _) in header.items()}
        self._ranges = {name: place for name, (_, place) in header.items()}

    def get_tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return tensors by name; those that are close to each other in the file share a mapping."""
        views: dict[str, Tensor] = {}
        with self._path.open("rb") as file:
            for (begin, end), members in merged({name: self._ranges[name] for name in names}):
                views |= self._views(file, begin, end, members)
        return {name: views[name] for name in names}

    def ask(self, names: Iterable[str]) -> None:
        """Ask the system to read the pages of tensors early, where it has a way to; returns at once."""
        if not hasattr(os, "posix_fadvise"):
            return
        with self._path.open("rb") as file:
            for (begin, end), _ in merged({name: self._ranges[name] for name in names}):
                os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_WILLNEED)

    def _views(self, file: BinaryIO, range_start: int, range_end: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors of one range of the file."""
        base = range_start - range_start % mmap.ALLOCATIONGRANULARITY
        mapping = (
            mmap.mmap(file.fileno(), range_end - base, access=mmap.ACCESS_COPY, offset=base)
            if range_end > range_start
            else b""
        )
        views = {}
        for name in names:
            header, (start, end) = self.headers[name], self._ranges[name]
            if header.dtype not in SAFETENSORS:
                raise SafetensorError(f"{name} has the dtype {header.dtype}, which is not supported")
            dtype = SAFETENSORS[header.dtype]
            if end == start:
                views[name] = torch.empty(header.shape, dtype=dtype)
                continue
            flat = torch.frombuffer(mapping, dtype=torch.uint8, count=end - start, offset=start - base)
            if start % dtype.itemsize:
                flat = flat.clone()  # the view must begin at a multiple of the size of a number
            views[name] = flat.view(dtype).view(header.shape)
        return views


def merged(ranges: Mapping[str, Range]) -> list[tuple[Range, list[str]]]:
    """Merge ranges that are at most `GAP` bytes apart; returns them with their names, in the order of the file."""
    merged_ranges: list[tuple[Range, list[str]]] = []
    for name, (start, stop) in sorted(ranges.items(), key=lambda item: item[1]):
        if merged_ranges and start - merged_ranges[-1][0][1] <= GAP:
            (begin, end), names = merged_ranges[-1]
            merged_ranges[-1] = (begin, max(end, stop)), [*names, name]
        else:
            merged_ranges.append(((start, stop), [name]))
    return merged_ranges
