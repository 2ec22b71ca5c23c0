"""Which kernel computes a layer that is held packed or sparse: the first registered one that supports the call.

The reference computes what none of them supports.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from compress.kernels import reference
from compress.numerics.quant.packed import PackedCodes
from compress.numerics.sparse.positions import SparseWeight


class Kernel(Protocol):
    """A faster way to compute x W^T + bias from packed codes of all weights (`kept` is None)."""

    def supports(self, x: Tensor, packed: PackedCodes) -> bool:
        """Whether this kernel can compute this call (device, dtype, bits, group size)."""
        ...

    def linear(self, x: Tensor, packed: PackedCodes, bias: Tensor | None) -> Tensor:
        """x W^T + bias, equal to the reference up to float rounding."""
        ...


KERNELS: list[Kernel] = []
"""Registered kernels, fastest first; empty until a backend adds its own."""


def linear(x: Tensor, weight: PackedCodes | SparseWeight, bias: Tensor | None) -> Tensor:
    """x W^T + bias by the fastest kernel that supports the call; kept weights alone are the reference's."""
    if isinstance(weight, SparseWeight) or weight.kept is not None:
        return reference.linear(x, weight, bias)
    for kernel in KERNELS:
        if kernel.supports(x, weight):
            return kernel.linear(x, weight, bias)
    return reference.linear(x, weight, bias)
