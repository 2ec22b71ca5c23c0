"""The instructions of a step as they are planned, and their memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compress.decode.layout import Buffer, NotRecordedError, Value
from compress.native.library import Weight
from compress.native.steps import DIMENSIONS, NUMBERS, OPERATIONS, Instruction, Joint, Operand, Rotation, Steps

ALIGNED = 64  # bytes
Placed = tuple[Value, Sequence[int]]
"""A value, and its strides in the dimensions of an instruction."""


@dataclass(eq=False)
class Planned:
    """An instruction. fields: of the C structure. products: (address of a weight, of its bias, result) each."""

    name: str
    sizes: Sequence[int]
    out: Placed | None
    inputs: Sequence[Placed | None]
    fields: Mapping[str, Any] = field(default_factory=dict)
    joint: Mapping[str, Any] = field(default_factory=dict)
    products: Sequence[tuple[int, int | None, Value]] = ()
    rotation: Mapping[str, Any] | None = None
    call: Callable[[Callable[[Value], Tensor]], None] | None = None

    def values(self) -> list[Value]:
        """All values that it reads or writes."""
        placed = [given[0] for given in (self.out, *self.inputs) if given is not None]
        return [*placed, *[product[2] for product in self.products]]


class Memory:
    """The addresses of a step's values: a slot for its own bytes, and one for each tensor that is given."""

    def __init__(
        self, planned: Sequence[Planned], outputs: Sequence[Value], called: Mapping[int, Sequence[Value]]
    ) -> None:
        """called: the values of instructions that the caller computes."""
        self.own: dict[int, Buffer] = {}
        self.given: dict[int, Buffer] = {}
        for at, one in enumerate(planned):
            for value in (*one.values(), *called.get(at, ())):
                self._used(value.buffer, at)
        for value in outputs:
            self._used(value.buffer, len(planned))
        size = place(list(self.own.values()))
        memory = torch.empty(size + ALIGNED, dtype=torch.uint8)
        self.bytes = memory[-memory.data_ptr() % ALIGNED :]
        self.slots = {key: 1 + i for i, key in enumerate(self.given)}

    def _used(self, buffer: Buffer, at: int) -> None:
        known = self.own if buffer.tensor is None else self.given
        if id(buffer) not in known:
            known[id(buffer)], buffer.first = buffer, at
        buffer.last = at

    def tensors(self) -> list[Tensor]:
        """The tensor of each slot."""
        return [self.bytes, *[buffer.tensor for buffer in self.given.values() if buffer.tensor is not None]]

    def operand(self, placed: Placed | None) -> Operand:
        """The C structure for a value."""
        if placed is None:
            return Operand(slot=-1)
        value, strides = placed
        offset = value.offset * value.dtype.itemsize + max(0, value.buffer.place)
        found = Operand(slot=self.slots.get(id(value.buffer), 0), offset=offset, type=NUMBERS[value.dtype])
        found.strides[: len(strides)] = strides
        return found

    def instruction(self, planned: Planned, keep: list[Any]) -> Instruction:
        """The C structure of an instruction. keep: what its addresses need is added."""
        made = Instruction(operation=OPERATIONS[planned.name], **planned.fields)
        made.sizes[:] = [*planned.sizes, *[1] * (DIMENSIONS - len(planned.sizes))]
        made.out = self.operand(planned.out)
        for i in range(len(made.inputs)):
            made.inputs[i] = self.operand(planned.inputs[i] if i < len(planned.inputs) else None)
        if planned.products:
            joint = Joint(count=len(planned.products), **planned.joint)
            for i, (weight, bias, y) in enumerate(planned.products):
                joint.weights[i] = ctypes.cast(weight, ctypes.POINTER(Weight))
                joint.bias[i], joint.y[i] = bias, self.operand((y, ()))
            made.products = ctypes.pointer(joint)
            keep.append(joint)
        if planned.rotation is not None:
            rotation = Rotation(**planned.rotation)
            made.rotation = ctypes.pointer(rotation)
            keep.append(rotation)
        return made


def check(placed: Sequence[Placed | None], sizes: Sequence[int]) -> None:
    """Raise NotRecordedError for numbers or dimensions that instructions do not have."""
    if len(sizes) > DIMENSIONS:
        raise NotRecordedError(f"an operation has {len(sizes)} dimensions")
    for given in placed:
        if given is not None and given[0].dtype not in NUMBERS:
            raise NotRecordedError(f"numbers of type {given[0].dtype}")


def steps_of(
    planned: Sequence[Planned], outputs: Sequence[Value], called: Mapping[int, Sequence[Value]], keep: list[Any]
) -> tuple[Steps, Memory, Callable[[Value], Tensor]]:
    """The steps, their memory, and a function that gives a value as a tensor."""
    memory = Memory(planned, outputs, called)
    made = [memory.instruction(one, keep) for one in planned]

    def tensor(value: Value) -> Tensor:
        return value.as_tensor(steps.slots[memory.slots.get(id(value.buffer), 0)])

    calls = {at: one.call for at, one in enumerate(planned) if one.call is not None}
    steps = Steps(made, memory.tensors(), {at: (lambda _, call=call: call(tensor)) for at, call in calls.items()}, keep)
    return steps, memory, tensor


def place(buffers: Sequence[Buffer]) -> int:
    """Give buffers places that those in use at the same time do not share. Returns the bytes of all."""
    free: list[tuple[int, int]] = [(0, 1 << 62)]  # (begin, end)
    used: list[Buffer] = []
    highest = 0
    for buffer in sorted(buffers, key=lambda b: b.first):
        for other in [other for other in used if other.last < buffer.first]:
            used.remove(other)
            free = joined([*free, (other.place, other.place + rounded(other.size))])
        at = next(i for i, (begin, end) in enumerate(free) if end - begin >= rounded(buffer.size))
        begin, end = free[at]
        buffer.place = begin
        free[at] = begin + rounded(buffer.size), end
        used.append(buffer)
        highest = max(highest, begin + rounded(buffer.size))
    return highest


def rounded(size: int) -> int:
    """A size in bytes that keeps what follows aligned."""
    return -(-size // ALIGNED) * ALIGNED


def joined(free: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Free places in order, with neighbours joined."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(free):
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        elif end > begin:
            found.append((begin, end))
    return found
