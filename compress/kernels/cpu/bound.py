"""Calls of the library whose arguments stay the same from one call to the next."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compress.kernels.contract import Kernel, Part, RoundingLike
from compress.kernels.cpu.library import library
from compress.kernels.cpu.packed import PackedCodes, pointer

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""compress_type of compress_cpu.h."""
AS_THEY_ARE, TO_INT8, TO_BF16, TO_INT8_GROUPS = 0, 1, 2, 3  # compress_rounding of compress_cpu.h
OUT_OF_MEMORY = -2


def check(failed: int) -> None:
    """Raise MemoryError for a call of the library that found no memory."""
    if failed == OUT_OF_MEMORY:
        raise MemoryError("the buffers of a kernel do not fit into memory")
    assert not failed, "sizes of packed weights do not fit together"


class BoundProducts:
    """x W^T + bias for the weights of some parts, whose checks and arguments are prepared once.

    One token of a small model takes a few microseconds per product, less than finding its kernel anew would take.
    """

    def __init__(
        self,
        kernel: Kernel,
        weights: Sequence[PackedCodes],
        dtype: torch.dtype,
        rounding: RoundingLike | None,
        mode: int,
    ) -> None:
        """weights: the parts as `kernel` prepared them. mode: what the kernel rounds inputs to, by the input alone."""
        native = library()
        assert native is not None
        self.kernel, self.weights, self.dtype, self.rounding, self.mode = kernel, tuple(weights), dtype, rounding, mode
        self._one, self._several = native.compress_product, native.compress_products
        self._rows, self._width = [weight.rows for weight in weights], weights[0].width
        self._pointers: Any = ctypes.c_void_p * len(weights)
        self._address, self._addresses = weights[0].address, self._pointers(*[weight.address for weight in weights])

    def computes(self, x: Tensor, parts: Sequence[Part], rounding: RoundingLike | None) -> bool:
        """Whether a call is one of these: the same unchanged parts, rounding and dtype. There are as many parts."""
        if rounding is not self.rounding or x.dtype is not self.dtype or not x.is_cpu or not x.is_contiguous():
            return False
        if x.requires_grad and torch.is_grad_enabled():
            return False
        for part, weight in zip(parts, self.weights):  # noqa: B905, SIM110  lengths and a generator take longer
            if part.cached(self.kernel) is not weight:
                return False
        return True

    def __call__(self, x: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor]:
        """x W^T + bias for each part. x: contiguous [*, in]."""
        shape, mode, width = x.shape[:-1], self.mode, self._width
        if not mode and (self.weights[0].narrow or torch.get_float32_matmul_precision() == "medium"):
            mode = TO_BF16
        rest = x.numel() // width, width, TYPES[self.dtype], mode, torch.get_num_threads()
        found = [x.new_empty((*shape, rows)) for rows in self._rows]
        biases = [None if bias is None else _bias(bias, self.dtype) for bias in biases]
        if len(found) == 1:
            here = x.data_ptr(), found[0].data_ptr(), pointer(biases[0])
            check(self._one(self._address, *here, None, *rest))
        else:
            many = self._pointers
            there = many(*[y.data_ptr() for y in found]), many(*[pointer(bias) for bias in biases])
            check(self._several(len(found), self._addresses, x.data_ptr(), *there, None, *rest))
        return found


def _bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    return bias if bias.dtype is dtype and bias.is_contiguous() else bias.to(dtype).contiguous()
