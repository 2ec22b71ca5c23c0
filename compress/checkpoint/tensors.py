"""Tensors of a checkpoint by name and range: memory-mapped, read when they are needed, prefetched for an accelerator.

An accelerator copies page-locked memory several times faster than mapped pages. A thread therefore reads the tensors of
the next block to page-locked memory while the accelerator computes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from compress.checkpoint.sources.stored import Place, opened_file
from compress.errors import ModelError
from compress.models.paged import paged
from compress.numerics.dtypes import SAFETENSORS

Key = tuple[Path, str]
"""A file and the name of a tensor in it."""
FileStamp = tuple[int, ...]
"""Number of a file on the disk, its size and the time of its last change."""


@dataclass
class Reading:
    """Seconds that a run waited for pages of mapped weights, and the bytes of those weights."""

    seconds: float = 0.0
    size_bytes: int = 0

    def wait_for(self, tensors: Iterable[Tensor]) -> None:
        """Touch every page of mapped tensors, so that no later computation waits for them, and add the time."""
        begin = perf_counter()
        for tensor in tensors:
            if tensor.numel():
                flat = tensor.reshape(-1).view(torch.uint8)
                flat[:: mmap.PAGESIZE].max()
                flat[-1:].max()
                self.size_bytes += tensor.nbytes
        self.seconds += perf_counter() - begin

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add the time in the context, in which a run waits for a thread that reads."""
        begin = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - begin


def page_locked(tensor: Tensor) -> Tensor:
    """Copy a tensor to memory that the system does not move, which an accelerator reads by itself.

    Where the system locks no more pages, as in some containers, it is an ordinary copy, which is slower to move.
    """
    try:
        return tensor.pin_memory()
    except RuntimeError:
        return tensor.clone()


class Prefetch:
    """The tensors of one request, which a thread reads into page-locked memory; a new request replaces them.

    Args:
        pin: copies a tensor to page-locked memory.
    """

    def __init__(self, pin: Callable[[Tensor], Tensor] = page_locked) -> None:
        self._pin = pin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compress-prefetch")
        self._asked: frozenset[Key] = frozenset()
        self._pending: Future[dict[Key, Tensor]] | None = None
        self._ready: dict[Key, Tensor] = {}

    def start(self, keys_by_file: Mapping[Path, Iterable[str]]) -> None:
        """Begin to read tensors, and return at once. Tensors of an earlier request that were not taken are freed."""
        request = frozenset((path, key) for path, keys in keys_by_file.items() for key in keys)
        if request == self._asked:
            return
        if self._pending is not None:
            self._pending.cancel()
        self._asked, self._ready = request, {}
        self._pending = self._thread.submit(self._read, {path: list(keys) for path, keys in keys_by_file.items()})

    def take(self, path: Path, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return those of these tensors that were requested, when they are read, and forget them.

        Raises:
            Exception: the error of the thread.
        """
        requested = [key for key in keys if (path, key) in self._asked]
        if not requested:
            return {}
        pending, self._pending = self._pending, None
        if pending is not None:
            request, self._asked = self._asked, frozenset()  # an error ends the request
            self._ready, self._asked = pending.result(), request
        self._asked -= {(path, key) for key in requested}
        return {key: self._ready.pop((path, key)) for key in requested}

    def _read(self, keys_by_file: Mapping[Path, list[str]]) -> dict[Key, Tensor]:
        pinned: dict[Key, Tensor] = {}
        for path, keys in keys_by_file.items():
            with opened_file(path) as file:
                for key, tensor in file.get_tensors(keys).items():
                    pinned[path, key] = self._pin(tensor)
        return pinned


def stamp_of(path: Path) -> FileStamp:
    """Return what differs if a file is replaced or changed; empty for a missing file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass
class StoredTensors:
    """Tensors in memory-mapped files, by name. A file that was replaced or changed since is an error.

    On a CPU, a tensor in its stored dtype is a view of the file, and takes only memory that the system can reclaim.

    Attributes:
        files: file of each tensor, and its name there.
        dtype: dtype of computation.
        wider_dtypes: dtype of the tensors that are read in a wider one, by name.
        ahead: reads the next block for an accelerator; by default one with CUDA.
        within: folder of the files that hold tensors which are no views of the checkpoint; None: they are in memory.
    """

    files: Mapping[str, Place]
    dtype: torch.dtype
    device: torch.device
    wider_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict, repr=False)
    stamps: dict[Path, FileStamp] = field(init=False, repr=False, compare=False)
    ahead: Prefetch | None = field(default=None, repr=False, compare=False)
    within: Path | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.ahead is None and self.device.type == "cuda":
            self.ahead = Prefetch()
        self.stamps = {path: stamp_of(path) for path in {place.path for place in self.files.values()}}

    def read(self, names: Iterable[str], reading: Reading | None = None) -> dict[str, Tensor]:
        """Read tensors to the device, those of floats in the dtype of computation. Arguments as of `read_raw`."""
        tensors = self.read_raw(names, reading)
        dtypes = {n: self.wider_dtypes.get(n, self.dtype) for n, t in tensors.items() if t.is_floating_point()}
        cast = ((name, tensors[name].to(dtype)) for name, dtype in dtypes.items() if tensors[name].dtype != dtype)
        return tensors | dict(paged(cast, self.within))

    def read_raw(self, names: Iterable[str], reading: Reading | None = None) -> dict[str, Tensor]:
        """Read tensors to the device in their stored dtype.

        Args:
            reading: the pages are read now, and their time is added here; None: when they are needed.

        Raises:
            ModelError: if a file is damaged, missing, or not the one that was opened.
        """
        tensors: dict[str, Tensor] = {}
        for path, places in self._by_file(names).items():
            if stamp_of(path) != self.stamps[path]:
                raise ModelError(
                    f"model: {path} was replaced or changed after it was opened; put the file back and start the same "
                    "command again, or overwrite the folder for the new file"
                )
            stored = self._read_file(path, list(dict.fromkeys(place.key for place in places.values())), reading)
            tensors |= {name: place.select(stored[place.key]) for name, place in places.items()}
        return tensors

    def _by_file(self, names: Iterable[str]) -> dict[Path, dict[str, Place]]:
        """Places in each file by name."""
        places_by_file: dict[Path, dict[str, Place]] = {}
        for name in names:
            place = self.files[name]
            places_by_file.setdefault(place.path, {})[name] = place
        return dict(sorted(places_by_file.items()))

    def _read_file(self, path: Path, keys: list[str], reading: Reading | None) -> dict[str, Tensor]:
        """Read tensors of one file. When this returns, copies are complete, so that page-locked memory is free."""
        ready: dict[str, Tensor] = {}
        if self.ahead is not None:
            with nullcontext() if reading is None else reading.counted():
                ready = self.ahead.take(path, keys)
        with opened_file(path) as file:
            tensors = ready | file.get_tensors([key for key in keys if key not in ready])
        if reading is not None:
            reading.wait_for(tensors.values())
        if self.device.type == "cuda":
            tensors = {key: tensor.to(self.device, non_blocking=True) for key, tensor in tensors.items()}
            torch.cuda.synchronize(self.device)
        return {key: tensor.to(self.device) for key, tensor in tensors.items()}

    def ask(self, names: Iterable[str]) -> None:
        """Begin to read tensors: the system, where it has a way to; for an accelerator, also a thread."""
        keys_by_file = {
            path: dict.fromkeys(place.key for place in places.values()) for path, places in self._by_file(names).items()
        }
        for path, keys in keys_by_file.items():
            with opened_file(path) as file:
                file.ask(list(keys))
        if self.ahead is not None:
            self.ahead.start(keys_by_file)

    def views(self, names: Iterable[str]) -> set[str]:
        """Return those of these names that `read` maps without a copy; no weight is read."""
        if self.device.type != "cpu":
            return set()
        places = {name: self.files[name] for name in names if name in self.files}
        mapped = {name: place for name, place in places.items() if place.path.suffix == ".safetensors"}  # not GGUF
        return {name for name, place in mapped.items() if SAFETENSORS.get(place.header.dtype) is self.dtype}
