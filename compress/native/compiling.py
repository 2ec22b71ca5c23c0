"""Marks for torch.compile, which do not import the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant_result(function: F) -> F:
    """Mark a function whose result is constant for torch.compile, such as one that calls ctypes.

    This is `torch.compiler.assume_constant_result` without its import of `torch._dynamo`, which takes a second.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function
