"""Which kernel computes a packed linear: the first registered one that supports the call, the reference otherwise."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from compress.kernels import reference
from compress.numerics.packed import PackedCodes


class Kernel(Protocol):
    """A faster way to compute x W^T + bias from packed codes."""

    def supports(self, x: Tensor, packed: PackedCodes) -> bool:
        """Whether this kernel can compute this call (device, dtype, bits, group size)."""
        ...

    def linear(self, x: Tensor, packed: PackedCodes, bias: Tensor | None) -> Tensor:
        """x W^T + bias, equal to the reference up to float rounding."""
        ...


KERNELS: list[Kernel] = []
"""Registered kernels, fastest first; empty until a backend adds its own."""


def linear(x: Tensor, packed: PackedCodes, bias: Tensor | None) -> Tensor:
    """x W^T + bias by the fastest kernel that supports the call."""
    for kernel in KERNELS:
        if kernel.supports(x, packed):
            return kernel.linear(x, packed, bias)
    return reference.linear(x, packed, bias)
