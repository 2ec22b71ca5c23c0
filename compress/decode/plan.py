"""The planned instructions of a step, and their memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compress.decode.layout import Buffer, UntraceableError, Value
from compress.native.library import Weight
from compress.native.steps import DIMENSIONS, NUMBERS, OPERATIONS, Instruction, Joint, Operand, Rotation, Steps

ALIGNMENT = 64  # bytes
StridedValue = tuple[Value, Sequence[int]]
"""A value with its strides in the dimensions of an instruction."""


@dataclass(eq=False)
class PlannedInstruction:
    """An instruction before its operands have addresses.

    Attributes:
        name: name of the operation.
        sizes: dimensions of the instruction.
        out: output operand, or None.
        inputs: input operands.
        fields: further fields of the C structure.
        joint: fields of the products with packed weights.
        products: address of the weight, address of the bias and result of each product.
        rotation: fields of a rotation, or None.
        call: function that computes the instruction in torch, or None.
    """

    name: str
    sizes: Sequence[int]
    out: StridedValue | None
    inputs: Sequence[StridedValue | None]
    fields: Mapping[str, Any] = field(default_factory=dict)
    joint: Mapping[str, Any] = field(default_factory=dict)
    products: Sequence[tuple[int, int | None, Value]] = ()
    rotation: Mapping[str, Any] | None = None
    call: Callable[[Callable[[Value], Tensor]], None] | None = None

    def values(self) -> list[Value]:
        """Return all values that the instruction reads or writes."""
        strided = [operand[0] for operand in (self.out, *self.inputs) if operand is not None]
        return [*strided, *[product[2] for product in self.products]]


class StepMemory:
    """The addresses of a step's values: a slot for the memory of the step, and one for each external tensor."""

    def __init__(
        self, planned: Sequence[PlannedInstruction], outputs: Sequence[Value], called: Mapping[int, Sequence[Value]]
    ) -> None:
        """Assign the memory of all values.

        Args:
            planned: the instructions.
            outputs: values of the outputs.
            called: values of instructions that torch computes, by instruction.
        """
        self.step_buffers: dict[int, Buffer] = {}
        self.external_buffers: dict[int, Buffer] = {}
        for position, instruction in enumerate(planned):
            for value in (*instruction.values(), *called.get(position, ())):
                self._record_use(value.buffer, position)
        for value in outputs:
            self._record_use(value.buffer, len(planned))
        size = assign_offsets(list(self.step_buffers.values()))
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        self.bytes = memory[-memory.data_ptr() % ALIGNMENT :]
        self.slots = {key: 1 + i for i, key in enumerate(self.external_buffers)}

    def _record_use(self, buffer: Buffer, position: int) -> None:
        buffers = self.step_buffers if buffer.tensor is None else self.external_buffers
        if id(buffer) not in buffers:
            buffers[id(buffer)], buffer.first_use = buffer, position
        buffer.last_use = position

    def tensors(self) -> list[Tensor]:
        """Return the tensor of each slot."""
        return [self.bytes, *[buffer.tensor for buffer in self.external_buffers.values() if buffer.tensor is not None]]

    def operand(self, strided_value: StridedValue | None) -> Operand:
        """Create the C structure of a value."""
        if strided_value is None:
            return Operand(slot=-1)
        value, strides = strided_value
        offset = value.offset * value.dtype.itemsize + max(0, value.buffer.offset)
        operand = Operand(slot=self.slots.get(id(value.buffer), 0), offset=offset, type=NUMBERS[value.dtype])
        operand.strides[: len(strides)] = strides
        return operand

    def instruction(self, planned: PlannedInstruction, keep: list[Any]) -> Instruction:
        """Create the C structure of an instruction.

        Args:
            planned: the instruction.
            keep: list to which objects are added that own the memory of its addresses.
        """
        instruction = Instruction(operation=OPERATIONS[planned.name], **planned.fields)
        instruction.sizes[:] = [*planned.sizes, *[1] * (DIMENSIONS - len(planned.sizes))]
        instruction.out = self.operand(planned.out)
        for i in range(len(instruction.inputs)):
            instruction.inputs[i] = self.operand(planned.inputs[i] if i < len(planned.inputs) else None)
        if planned.products:
            joint = Joint(count=len(planned.products), **planned.joint)
            for i, (weight, bias, y) in enumerate(planned.products):
                joint.weights[i] = ctypes.cast(weight, ctypes.POINTER(Weight))
                joint.bias[i], joint.y[i] = bias, self.operand((y, ()))
            instruction.products = ctypes.pointer(joint)
            keep.append(joint)
        if planned.rotation is not None:
            rotation = Rotation(**planned.rotation)
            instruction.rotation = ctypes.pointer(rotation)
            keep.append(rotation)
        return instruction


def check_operands(operands: Sequence[StridedValue | None], sizes: Sequence[int]) -> None:
    """Check the dtypes and dimensions of an instruction.

    Raises:
        UntraceableError: for dtypes or dimensions that instructions do not support.
    """
    if len(sizes) > DIMENSIONS:
        raise UntraceableError(f"an operation has {len(sizes)} dimensions")
    for strided_value in operands:
        if strided_value is not None and strided_value[0].dtype not in NUMBERS:
            raise UntraceableError(f"numbers of type {strided_value[0].dtype}")


def build_steps(
    planned: Sequence[PlannedInstruction],
    outputs: Sequence[Value],
    called: Mapping[int, Sequence[Value]],
    keep: list[Any],
) -> tuple[Steps, StepMemory, Callable[[Value], Tensor]]:
    """Build the steps.

    Returns:
        The steps, their memory, and a function that converts a value to a tensor.
    """
    memory = StepMemory(planned, outputs, called)
    instructions = [memory.instruction(item, keep) for item in planned]

    def tensor(value: Value) -> Tensor:
        return value.as_tensor(steps.slots[memory.slots.get(id(value.buffer), 0)])

    calls = {position: item.call for position, item in enumerate(planned) if item.call is not None}
    steps = Steps(
        instructions,
        memory.tensors(),
        {position: (lambda _, call=call: call(tensor)) for position, call in calls.items()},
        keep,
    )
    return steps, memory, tensor


def assign_offsets(buffers: Sequence[Buffer]) -> int:
    """Assign offsets such that buffers in use at the same time do not overlap.

    Returns:
        The total size in bytes.
    """
    free: list[tuple[int, int]] = [(0, 1 << 62)]  # (begin, end)
    used: list[Buffer] = []
    highest = 0
    for buffer in sorted(buffers, key=lambda b: b.first_use):
        for earlier in [earlier for earlier in used if earlier.last_use < buffer.first_use]:
            used.remove(earlier)
            free = merge_free([*free, (earlier.offset, earlier.offset + aligned_size(earlier.size))])
        slot = next(i for i, (begin, end) in enumerate(free) if end - begin >= aligned_size(buffer.size))
        begin, end = free[slot]
        buffer.offset = begin
        free[slot] = begin + aligned_size(buffer.size), end
        used.append(buffer)
        highest = max(highest, begin + aligned_size(buffer.size))
    return highest


def aligned_size(size: int) -> int:
    """Round a size in bytes up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def merge_free(free: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort free ranges, and merge adjacent ones."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(free):
        if merged and merged[-1][1] == begin:
            merged[-1] = merged[-1][0], end
        elif end > begin:
            merged.append((begin, end))
    return merged
