"""Prefetch the weights of the next block for an accelerator: from mapped files to page-locked memory, in a thread.

An accelerator copies page-locked memory several times faster than mapped pages, and the disk is read while it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.sources.reading import Reading
from compress.checkpoint.sources.stored import opened_file

Place = tuple[Path, str]
"""A file and the name of a tensor in it."""


def page_locked(tensor: Tensor) -> Tensor:
    """A copy in memory that the system does not move, which an accelerator reads by itself.

    Where the system locks no more pages, as in some containers, it is an ordinary copy, which is slower to move.
    """
    try:
        return tensor.pin_memory()
    except RuntimeError:
        return tensor.clone()


class Prefetch:
    """The tensors of one request, which a thread reads into page-locked memory; a new request replaces them.

    pin: copies a tensor to page-locked memory.
    """

    def __init__(self, pin: Callable[[Tensor], Tensor] = page_locked) -> None:
        self._pin = pin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compress-prefetch")
        self._asked: frozenset[Place] = frozenset()
        self._pending: Future[dict[Place, Tensor]] | None = None
        self._ready: dict[Place, Tensor] = {}

    def start(self, places: Mapping[Path, Iterable[str]]) -> None:
        """Begin to read these tensors; returns at once. Tensors of an earlier request that were not taken are freed."""
        asked = frozenset((path, key) for path, keys in places.items() for key in keys)
        if asked == self._asked:
            return
        if self._pending is not None:
            self._pending.cancel()
        self._asked, self._ready = asked, {}
        self._pending = self._thread.submit(self._read, {path: list(keys) for path, keys in places.items()})

    def take(self, path: Path, keys: Iterable[str]) -> dict[str, Tensor]:
        """Those of these tensors that were requested, when they are read; they are not kept.

        Raises the error of the thread.
        """
        wanted = [key for key in keys if (path, key) in self._asked]
        if not wanted:
            return {}
        pending, self._pending = self._pending, None
        if pending is not None:
            asked, self._asked = self._asked, frozenset()  # an error ends the request
            self._ready, self._asked = pending.result(), asked
        self._asked -= {(path, key) for key in wanted}
        return {key: self._ready.pop((path, key)) for key in wanted}

    def _read(self, places: Mapping[Path, list[str]]) -> dict[Place, Tensor]:
        found: dict[Place, Tensor] = {}
        for path, keys in places.items():
            with opened_file(path) as file:
                for key, tensor in file.get_tensors(keys).items():
                    found[path, key] = self._pin(tensor)
        return found


def read(
    file: Any, path: Path, keys: Iterable[str], ahead: Prefetch | None, reading: Reading | None
) -> dict[str, Tensor]:
    """Tensors of an open file, from `ahead` those that it has. reading: counts the time until all pages are read."""
    wanted, ready = list(keys), {}
    if ahead is not None:
        with nullcontext() if reading is None else reading.counted():
            ready = ahead.take(path, wanted)
    found = ready | file.get_tensors([key for key in wanted if key not in ready])
    if reading is not None:
        reading.wait_for(found.values())
    return found


def copied(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on a device. When this returns, the copies are complete, so that page-locked memory is free again."""
    found = {name: tensor.to(device, non_blocking=device.type == "cuda") for name, tensor in tensors.items()}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found
