"""Whether a step of a model is recorded: kernels are then called as torch operators, which the recorder sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_open: list[bool] = []


@contextmanager
def recorded() -> Iterator[None]:
    """Call kernels as operators while the context is open."""
    _open.append(True)
    try:
        yield
    finally:
        _open.pop()


def as_operators() -> bool:
    """Whether kernels are called as operators of torch: by torch.compile, and while a step is recorded."""
    return torch.compiler.is_compiling() or bool(_open)
