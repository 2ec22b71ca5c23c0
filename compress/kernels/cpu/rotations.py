"""Products of rows and randomized Hadamard matrices on the CPU, and their torch operator."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from compress.kernels.cpu.codes import TYPES
from compress.kernels.recording import as_operators
from compress.native.compiling import constant_result
from compress.native.library import LANES, HadamardMatrix, check_status, library, pointer
from compress.numerics.hadamard import factors, hadamard

LARGEST = 512  # order of the largest dense factor; torch multiplies larger ones


@dataclass(frozen=True, eq=False)
class HadamardSteps:
    """A Hadamard matrix as compress_cpu.h describes it.

    Attributes:
        matrices: float32, the inner matrix and the outer ones.
        lengths: int64, orders of all matrices except the first.
        inner: order of the inner matrix.
        levels: number of butterfly levels.
        order: order of the matrix.
    """

    matrices: Tensor
    lengths: Tensor
    inner: int
    levels: int
    order: int

    @cached_property
    def matrix(self) -> HadamardMatrix:
        """The C structure; valid as long as the tensors are."""
        return HadamardMatrix(
            matrices=pointer(self.matrices),
            lengths=pointer(self.lengths),
            numbers=self.matrices.numel(),
            count=self.lengths.numel(),
            inner=self.inner,
            levels=self.levels,
            order=self.order,
        )

    @cached_property
    def address(self) -> int:
        """The address of the C structure."""
        return ctypes.addressof(self.matrix)


@cache
def steps(order: int, inverse: bool) -> HadamardSteps | None:
    """Return the steps of a product with a matrix or its inverse; None if a dense factor is larger than `LARGEST`.

    Butterflies take whole vectors, so the innermost 16 rows are multiplied as one matrix; if the order has fewer
    factors of 2, the smallest Paley matrix is merged into them.
    """
    parts = factors(order)
    if parts is None:
        return None
    paley, twos = [part for part in parts if part != 2], parts.count(2)
    low = min(twos, 4)
    inner = hadamard(2**low)
    if twos < 3 and paley:
        inner = torch.kron(hadamard(paley.pop()), inner)
    if max([len(inner), *paley]) > LARGEST:
        return None
    outer_matrices = [hadamard(part) for part in reversed(paley)]
    if inverse:
        inner, outer_matrices = inner.T, [matrix.T for matrix in outer_matrices]
    with torch.inference_mode(False):
        padded = torch.nn.functional.pad(inner, (0, -len(inner) % LANES))
        matrices = torch.cat([matrix.flatten().float() for matrix in (padded, *outer_matrices)])
        lengths = torch.tensor([len(matrix) for matrix in outer_matrices], dtype=torch.int64, device="cpu")
    return HadamardSteps(matrices, lengths, len(inner), twos - low, order)


def rotate(
    x: Tensor,
    signs: Tensor,
    order: int,
    outputs: bool = False,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute (x * signs) H / sqrt(order), or x H^T / sqrt(order) * signs + bias, for runs of `order` channels, in
    float32.

    Args:
        x: float32 or bfloat16.
        signs: int8, one per channel.
        order: order of the matrix.
        outputs: whether to compute the second formula.
        bias: bias of the second formula, or None.
        dtype: dtype of the result; None: that of x.

    Raises:
        MemoryError: if the buffers do not fit into memory.
    """
    native, hadamard_steps = library(), steps(order, outputs)
    assert native is not None and hadamard_steps is not None
    if signs.dtype != torch.int8 or signs.shape != x.shape[-1:] or (bias is not None and bias.shape != signs.shape):
        raise ValueError(f"signs or bias do not fit inputs {list(x.shape)}")
    width, rows = x.shape[-1], x
    if not x.is_contiguous():
        rows = x.reshape(-1, width)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    y = x.new_empty(x.shape, dtype=dtype or x.dtype)
    signs, bias = signs.contiguous(), None if bias is None else bias.float().contiguous()
    count, step = x.numel() // max(1, width), width if rows is x else rows.stride(0)
    status = native.compress_rotate(
        hadamard_steps.address,
        rows.data_ptr(),
        y.data_ptr(),
        signs.data_ptr(),
        pointer(bias),
        count,
        width,
        step,
        TYPES[x.dtype],
        TYPES[y.dtype],
        outputs,
        torch.get_num_threads(),
    )
    check_status(status, "sizes of a Hadamard matrix and its inputs do not fit together")
    return y


_LIBRARY = torch.library.Library("compress", "FRAGMENT")
_LIBRARY.define(
    "rotate(Tensor x, Tensor signs, int order, bool outputs, Tensor? bias, ScalarType? dtype) -> Tensor",
)
_LIBRARY.impl("rotate", rotate, "CPU")


def _shape_of_rotated(
    x: Tensor, signs: Tensor, order: int, outputs: bool, bias: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


torch.library.register_fake("compress::rotate", _shape_of_rotated, lib=_LIBRARY)


def rotated(
    x: Tensor,
    signs: Tensor,
    order: int,
    outputs: bool = False,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `rotate`, as the operator if torch traces."""
    if as_operators():
        return torch.ops.compress.rotate(x, signs, order, outputs, bias, dtype)
    return rotate(x, signs, order, outputs, bias, dtype)


@constant_result
def has_steps(order: int) -> bool:
    """Whether a matrix of this order is supported; a constant for torch.compile."""
    return library() is not None and steps(order, False) is not None
