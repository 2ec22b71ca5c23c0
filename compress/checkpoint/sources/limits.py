"""Limits for building a model from its configuration: as many modules and bytes as its files can be for.

A configuration of a few bytes may ask for any number of layers and any size. Tensors are checked before they are
allocated. The limits are far above what models need: 32 times the bytes of the files for memory that is reserved only
(`torch.empty`; weights of 1 bit in float32), twice the bytes for memory that is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from compress.errors import ModelError

BYTES = 1 << 26
"""Bytes that any model may allocate for tensors."""
RESERVED, WRITTEN = 32, 2
"""The limits of the size of one tensor relative to the bytes of the files."""
WIDEST = 8  # bytes of the widest number that a tensor holds
MODULES, PER_MODULE = 5_000, 256
"""The number of modules that any model may have, and the bytes of the files that allow another one."""
WITHOUT_FILES = 400_000
"""The modules of a model that is planned without files of weights: three times those of 60 blocks of 384 experts."""


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the files of a folder that hold tensors."""
    paths = [path for kind in ("*.safetensors", "*/*.safetensors", "*.gguf") for path in folder.glob(kind)]
    return sum(path.stat().st_size for path in paths if path.is_file())


class _Sizes(TorchDispatchMode):
    """Raise ModelError before a tensor is allocated that is too large."""

    def __init__(self, folder: Path, without_data: bool) -> None:
        super().__init__()
        self._folder, self._bytes, self._without_data = folder, stored_bytes(folder), without_data

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if options.get("device") is not None and torch.device(options["device"]).type != "meta":
            planned, empty = func(*args, **{**options, "device": torch.device("meta")}), "empty" in str(func)
            if isinstance(planned, Tensor):
                if empty and self._without_data and not self._bytes:
                    return (
                        planned  # a model without files of weights: nothing is allocated, and nothing to compare with
                    )
                self._check(planned.nbytes, RESERVED if empty else WRITTEN, list(planned.shape))
                if empty and self._without_data:
                    return planned
        elif any(isinstance(arg, Tensor) and not arg.is_meta for arg in args):
            shapes = [tuple(arg.shape) for arg in args if isinstance(arg, Tensor)]
            self._check(_broadcast(shapes) * WIDEST, WRITTEN, shapes)
        return func(*args, **options)

    def _check(self, needed: int, factor: int, shape: Any) -> None:
        if needed > factor * self._bytes + BYTES:
            raise ModelError(
                f"model: {self._folder / 'config.json'} asks for a tensor {shape} of {needed} bytes, but the files of "
                f"the model have {self._bytes} bytes; correct the file, or fetch it again"
            )


def _broadcast(shapes: list[tuple[int, ...]]) -> int:
    try:
        return prod(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return 0  # not broadcast


@contextmanager
def limited_modules(described_in: Path, size: int) -> Iterator[None]:
    """Raise ModelError when more modules are built inside of the context than the files of a model can be for.

    Args:
        described_in: File that describes the model.
        size: Bytes of the files that hold its tensors; 0: there are none.
    """
    most, count = MODULES + size // PER_MODULE if size else WITHOUT_FILES, 0

    def register(module: nn.Module, name: str, child: Any) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise ModelError(
                f"model: {described_in} describes a model of more than {most} modules, which the files of "
                "the model are too small for; correct the file, or fetch it again"
            )

    handle = register_module_module_registration_hook(register)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def limited(folder: Path, without_data: bool = False) -> Iterator[None]:
    """Raise ModelError when a model is built inside of the context that the files of a folder are too small for.

    without_data: tensors of `torch.empty` are on the meta device. Otherwise a system that counts reserved memory counts
    the parameters of the whole model, though each is dropped at once: small objects keep the allocator from using the
    memory again.
    """
    with limited_modules(folder / "config.json", stored_bytes(folder)), _Sizes(folder, without_data):
        yield
