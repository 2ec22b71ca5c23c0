"""The memory layout of the values of a traced step, and the operands of its instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from compress.errors import CompressError
from compress.native.steps import DIMENSIONS


class UntraceableError(CompressError):
    """A step that cannot be traced, and the reason."""


@dataclass(eq=False)
class Buffer:
    """Memory of a step: an external tensor, or bytes that a value needs between two instructions.

    Attributes:
        tensor: the external tensor, or None.
        size: size in bytes.
        first_use: first instruction that uses the bytes.
        last_use: last instruction that uses the bytes.
        offset: offset of the bytes in the memory of the step.
    """

    tensor: Tensor | None
    size: int
    first_use: int = 0
    last_use: int = 0
    offset: int = -1

    def is_at(self, tensor: Tensor) -> bool:
        """Return whether the buffer is an external tensor with the same address as `tensor`."""
        return self.tensor is not None and self.tensor.data_ptr() == tensor.data_ptr()


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of a step, stored in a buffer.

    Attributes:
        buffer: memory of the value.
        sizes: shape of the tensor.
        strides: strides in elements.
        dtype: dtype of the tensor.
        offset: offset in the buffer in elements.
        constant: whether the value is the same in every step.
        shared: for keys or values [batch, heads, keys, width] with repeated heads that only attention reads, the value
            [batch, key heads, repeats, keys, width] before the repetition.
    """

    buffer: Buffer
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    constant: bool = False
    shared: Value | None = None

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.sizes)

    def as_tensor(self, memory: Tensor) -> Tensor:
        """Return the value as a tensor.

        Args:
            memory: tensor of the buffer, or the memory of the step.
        """
        assert self.shared is None, "attention alone reads shared heads"
        if self.buffer.tensor is None:
            memory = memory[self.buffer.offset : self.buffer.offset + self.buffer.size]
        if memory.dtype is not self.dtype:
            memory = memory.flatten().view(self.dtype)
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)

    def expanded(self, sizes: Sequence[int]) -> Value:
        """Broadcast the value to `sizes` without a copy."""
        added_dimensions = len(sizes) - len(self.sizes)
        dimensions = zip(self.sizes, self.strides, sizes[added_dimensions:], strict=True)
        strides = [0] * added_dimensions + [
            0 if size == 1 and target != 1 else stride for size, stride, target in dimensions
        ]
        return Value(self.buffer, tuple(sizes), tuple(strides), self.dtype, self.offset, self.constant)

    @property
    def contiguous(self) -> bool:
        """Whether the elements are contiguous in memory."""
        expected_strides = contiguous_strides(self.sizes)
        return all(size == 1 or a == b for size, a, b in zip(self.sizes, self.strides, expected_strides, strict=True))


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))


@dataclass(eq=False)
class Shape:
    """The dimensions of an instruction; both lists have `DIMENSIONS` entries per operand.

    Attributes:
        sizes: size of each dimension.
        strides: strides of each operand.
    """

    sizes: list[int]
    strides: list[list[int]]


def collapse_dimensions(sizes: Sequence[int], strides: Sequence[Sequence[int]], trailing: int = 0) -> Shape:
    """Join dimensions that are contiguous in all operands, and pad with leading dimensions of size one.

    Args:
        sizes: size of each dimension.
        strides: strides of each operand.
        trailing: number of dimensions at the end that are not joined with earlier ones.

    Raises:
        UntraceableError: if more than `DIMENSIONS` dimensions remain.
    """
    head = len(sizes) - trailing
    joined_sizes: list[int] = []
    joined_strides: list[list[int]] = [[] for _ in strides]
    for i, size in enumerate(sizes):
        if size == 1 and i < head:
            continue
        can_join = (
            bool(joined_sizes)
            and i != head
            and all(
                operand_strides[-1] == original[i] * size
                for operand_strides, original in zip(joined_strides, strides, strict=True)
            )
        )
        if can_join:
            joined_sizes[-1] *= size
            for operand_strides, original in zip(joined_strides, strides, strict=True):
                operand_strides[-1] = original[i]
            continue
        joined_sizes.append(size)
        for operand_strides, original in zip(joined_strides, strides, strict=True):
            operand_strides.append(original[i])
    if len(joined_sizes) > DIMENSIONS:
        raise UntraceableError(f"an operation has {len(joined_sizes)} dimensions")
    padding = DIMENSIONS - len(joined_sizes)
    return Shape([1] * padding + joined_sizes, [[0] * padding + operand_strides for operand_strides in joined_strides])
