"""Where the values of a recorded step are, and the operands of its instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from compress.errors import CompressError
from compress.native.steps import DIMENSIONS


class NotRecordedError(CompressError):
    """A step that cannot be recorded, and why."""


@dataclass(eq=False)
class Buffer:
    """Memory of a step: a tensor that is given, or bytes that a value needs between two instructions.

    last: the last instruction that uses the bytes. place: their place in the memory of the step.
    """

    tensor: Tensor | None
    size: int
    first: int = 0
    last: int = 0
    place: int = -1

    def is_at(self, tensor: Tensor) -> bool:
        """Whether it is a given tensor that begins where another does."""
        return self.tensor is not None and self.tensor.data_ptr() == tensor.data_ptr()


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of a step: numbers of a buffer from `offset` on.

    offset, strides: in numbers. constant: the same in every step. shared: of keys or values [batch, heads, keys, width]
    that attention alone reads, and whose heads are repeated: [batch, fewer heads, repeats, keys, width].
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
        """The number of its numbers."""
        return prod(self.sizes)

    def as_tensor(self, memory: Tensor) -> Tensor:
        """The value as a tensor. memory: the tensor of its buffer, or the bytes of the step."""
        assert self.shared is None, "attention alone reads shared heads"
        if self.buffer.tensor is None:
            memory = memory[self.buffer.place : self.buffer.place + self.buffer.size]
        if memory.dtype is not self.dtype:
            memory = memory.flatten().view(self.dtype)
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)

    def expanded(self, sizes: Sequence[int]) -> Value:
        """The value with more dimensions and repeated ones, without a copy."""
        missing = len(sizes) - len(self.sizes)
        own = zip(self.sizes, self.strides, sizes[missing:], strict=True)
        strides = [0] * missing + [0 if size == 1 and wanted != 1 else stride for size, stride, wanted in own]
        return Value(self.buffer, tuple(sizes), tuple(strides), self.dtype, self.offset, self.constant)

    @property
    def contiguous(self) -> bool:
        """Whether its numbers stand one after the other."""
        wanted = contiguous_strides(self.sizes)
        return all(size == 1 or a == b for size, a, b in zip(self.sizes, self.strides, wanted, strict=True))


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of numbers that stand one after the other."""
    return tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))


@dataclass(eq=False)
class Shape:
    """The dimensions of an instruction: sizes, and the strides of each operand, `DIMENSIONS` of them."""

    sizes: list[int]
    strides: list[list[int]]


def collapsed(sizes: Sequence[int], strides: Sequence[Sequence[int]], last: int = 0) -> Shape:
    """Join dimensions that all operands take in one, and pad with dimensions of one number in front.

    last: this many dimensions at the end stay apart from those before them. Raises NotRecordedError if too many remain.
    """
    head = len(sizes) - last
    kept: list[int] = []
    found: list[list[int]] = [[] for _ in strides]
    for i, size in enumerate(sizes):
        if size == 1 and i < head:
            continue
        joins = bool(kept) and i != head and all(s[-1] == o[i] * size for s, o in zip(found, strides, strict=True))
        if joins:
            kept[-1] *= size
            for s, o in zip(found, strides, strict=True):
                s[-1] = o[i]
            continue
        kept.append(size)
        for s, o in zip(found, strides, strict=True):
            s.append(o[i])
    if len(kept) > DIMENSIONS:
        raise NotRecordedError(f"an operation has {len(kept)} dimensions")
    missing = DIMENSIONS - len(kept)
    return Shape([1] * missing + kept, [[0] * missing + s for s in found])
