"""Calls of kernels as torch operators, so that torch.compile and the tracer of decode steps see them."""

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
    """Whether kernels are called as torch operators: within torch.compile, and while a decode step is traced."""
    return torch.compiler.is_compiling() or bool(_open)
