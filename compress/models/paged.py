"""Tensors in files without names, in place of memory: the system takes their pages back when it needs memory."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import SaveError
from compress.models.tensors import assign
from compress.numerics.dtypes import bytes_of

PORTION_BYTES = 1 << 26
"""Tensors of this size together are moved to one file."""
LEAST_BYTES = 1 << 20  # of tensors that are moved to a file; smaller ones are not worth it
ALIGNMENT = 64  # bytes, as of torch's allocator, because the last bit of a product may depend on it


def portion_bytes(largest_bytes: int) -> int:
    """Return the most memory of tensors that wait for their file, the largest of which has `largest_bytes`."""
    return PORTION_BYTES + largest_bytes


def paged(tensors: Iterable[tuple[str, Tensor]], within: Path | None) -> Iterator[tuple[str, Tensor]]:
    """Yield equal tensors that are views of files.

    A portion of the tensors is in memory at a time, if each is computed when it is asked for. Tensors that no file can
    replace are yielded as they are (`in_file`).

    Args:
        tensors: (name, tensor).
        within: folder of the files; None: all tensors stay in memory.

    Raises:
        SaveError: if a file cannot be written.
    """
    waiting: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if within is None:
            yield name, tensor
            continue
        waiting[name] = tensor
        size += tensor.nbytes
        del tensor
        if size >= PORTION_BYTES:
            yield from in_file(waiting, within).items()
            waiting, size = {}, 0
    if within is not None:
        yield from in_file(waiting, within).items()


def in_file(tensors: Mapping[str, Tensor], within: Path) -> dict[str, Tensor]:
    """Write tensors to one file, and return them as views of it.

    The file has no name any more, so it ends with its last view. Tensors are returned as they are if they are on an
    accelerator or in no plain order, all of them if they are smaller than `LEAST_BYTES` together, or if the system does
    not remove files with views (Windows).

    Args:
        tensors: tensors by name.
        within: folder in which the file is created.

    Raises:
        SaveError: if the file cannot be written.
    """
    plain = {name: ordered for name, tensor in tensors.items() if (ordered := _ordered(tensor)) is not None}
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in plain.values()]
    if os.name != "posix" or sum(tensor.nbytes for tensor in plain.values()) < LEAST_BYTES:
        return dict(tensors)
    starts = [0, *accumulate(sizes)]
    try:
        within.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix="compress-weights-", dir=within) as file:
            for tensor, start in zip(plain.values(), starts, strict=False):
                file.seek(start)
                file.write(bytes_of(tensor).numpy().data)
            file.truncate(starts[-1])
            file.flush()
            storage: Any = torch.UntypedStorage.from_file(file.name, False, starts[-1])
    except OSError as error:
        message = f"weights of a block cannot be written to {within} ({error}); free disk space there"
        raise SaveError(message) from error
    views = dict(tensors)
    for (name, tensor), start in zip(plain.items(), starts, strict=False):
        view = torch.empty(0, dtype=tensor.dtype).set_(storage, start // tensor.itemsize, tensor.shape, tensor.stride())
        views[name] = view if tensors[name].is_contiguous() else view.T
    return views


def _ordered(tensor: Tensor) -> Tensor | None:
    """Return a contiguous tensor with the same bytes: the tensor, or its transpose; None for others."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not tensor.numel():
        return None
    if tensor.is_contiguous():
        return tensor
    return tensor.T if tensor.ndim == 2 and tensor.T.is_contiguous() else None


def hold_in_file(modules: Sequence[nn.Module], within: Path) -> None:
    """Replace the tensors of modules by equal views of a file (`in_file`).

    Tensors that are views of larger ones or of files, or belong to several modules, stay where they are.

    Args:
        modules: the modules.
        within: folder in which the file is created.

    Raises:
        SaveError: if the file cannot be written.
    """
    states = [module.state_dict() for module in modules]
    uses = Counter(tensor.data_ptr() for state in states for tensor in state.values())
    tensors = {
        f"{number}.{name}": tensor
        for number, state in enumerate(states)
        for name, tensor in state.items()
        if uses[tensor.data_ptr()] == 1 and tensor.untyped_storage().nbytes() == tensor.nbytes
    }
    views = in_file(tensors, within)
    for number, module in enumerate(modules):
        prefix = f"{number}."
        assign(
            module,
            {n.removeprefix(prefix): v for n, v in views.items() if n.startswith(prefix) and v is not tensors[n]},
        )


class Paging:
    """Moves the tensors of modules to files, a portion at a time.

    Args:
        within: folder of the files; None: the tensors stay in memory.
    """

    def __init__(self, within: Path | None) -> None:
        self._within = within
        self._waiting: list[nn.Module] = []
        self._bytes = 0

    def add(self, module: nn.Module) -> None:
        """Add a module whose tensors do not change any more."""
        if self._within is None:
            return
        self._waiting.append(module)
        self._bytes += sum(tensor.nbytes for tensor in module.state_dict().values())
        if self._bytes >= PORTION_BYTES:
            self.finish()

    def finish(self) -> None:
        """Move the modules that wait."""
        if self._within is not None and self._waiting:
            hold_in_file(self._waiting, self._within)
        self._waiting, self._bytes = [], 0
