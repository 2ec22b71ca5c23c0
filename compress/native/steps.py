"""A traced step of a model as a list of instructions for the C++ library: their C structures, and a runner."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from compress.native.library import OUT_OF_MEMORY, Weight, library

DIMENSIONS, INPUTS, TOGETHER = 6, 4, 8  # COMPRESS_MOST_DIMENSIONS, _INPUTS, _PRODUCTS of compress_cpu.h
NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2, torch.bool: 3, torch.uint8: 4, torch.int32: 5}
"""compress_number by dtype."""
_OF_ONE = (
    "copy",
    "neg",
    "abs",
    "square",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "exp",
    "log",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "logical_not",
)
_OF_TWO = (
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "minimum",
    "maximum",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "logical_and",
    "logical_or",
)
OPERATIONS = {
    **{name: i for i, name in enumerate(_OF_ONE)},
    **{name: 32 + i for i, name in enumerate(_OF_TWO)},
    "where": 64,
    "sum": 80,
    "mean": 81,
    "amax": 82,
    "softmax": 88,
    "native_layer_norm": 89,
    "index_select": 96,
    "index_copy": 97,
    "attend": 112,
    "packed_linear": 120,
    "rotate": 121,
    "caller": 127,
}
"""`compress_operation` of compress_cpu.h by the name of the operation in torch."""


class Operand(ctypes.Structure):
    """`compress_operand` of compress_cpu.h."""

    _fields_ = [("slot", c_int64), ("offset", c_int64), ("strides", c_int64 * DIMENSIONS), ("type", c_int64)]


class Joint(ctypes.Structure):
    """`compress_joint` of compress_cpu.h."""

    _fields_ = [
        ("weights", ctypes.POINTER(Weight) * TOGETHER),
        ("bias", c_void_p * TOGETHER),
        ("y", Operand * TOGETHER),
        ("static_scale", c_void_p),
        ("count", c_int64),
        ("m", c_int64),
        ("ldx", c_int64),
        ("type", c_int32),
        ("rounded", c_int32),
        ("bits", c_int32),
        ("clip", c_float),
    ]


class Rotation(ctypes.Structure):
    """`compress_rotation` of compress_cpu.h."""

    _fields_ = [
        ("matrix", c_void_p),
        ("x", c_void_p),
        ("y", c_void_p),
        ("signs", c_void_p),
        ("bias", c_void_p),
        ("m", c_int64),
        ("width", c_int64),
        ("ldx", c_int64),
        ("x_type", c_int32),
        ("y_type", c_int32),
        ("outputs", c_int32),
        ("threads", c_int32),
    ]


class Instruction(ctypes.Structure):
    """`compress_instruction` of compress_cpu.h."""

    _fields_ = [
        ("operation", c_int64),
        ("whole", c_int64),
        ("sizes", c_int64 * DIMENSIONS),
        ("out", Operand),
        ("inputs", Operand * INPUTS),
        ("along", c_int64),
        ("limit", c_int64),
        ("numbers", c_float * 2),
        ("products", ctypes.POINTER(Joint)),
        ("rotation", ctypes.POINTER(Rotation)),
    ]


class Steps:
    """Instructions with the memory that they use.

    Args:
        instructions: the instructions, in order.
        slots: the tensor of each slot.
        calls: functions of instructions that Python computes, by index.
        keep: objects that own the memory of addresses in the instructions.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        slots: Sequence[Tensor],
        calls: Mapping[int, Callable[[Sequence[Tensor]], None]],
        keep: Any = None,
    ) -> None:
        self.slots, self.calls, self._keep = list(slots), calls, (keep, instructions)
        self._code = (Instruction * len(instructions))(*instructions)
        self._bases = (c_void_p * len(slots))(*[tensor.data_ptr() for tensor in slots])

    @property
    def count(self) -> int:
        """Number of instructions."""
        return len(self._code)

    def bind(self, slot: int, tensor: Tensor) -> None:
        """Replace the tensor of a slot by another one of the same layout."""
        self.slots[slot] = tensor
        self._bases[slot] = tensor.data_ptr()

    def run(self, threads: int) -> None:
        """Compute all instructions.

        Raises:
            IndexError: if an index is outside of a tensor.
            MemoryError: if the buffers do not fit into memory.
        """
        native, at, count = library(), 0, len(self._code)
        assert native is not None
        while True:
            at = native.compress_run(self._code, at, count, self._bases, threads)
            if at == count:
                return
            if at == OUT_OF_MEMORY:
                raise MemoryError("the buffers of a step do not fit into memory")
            if at < 0:
                raise IndexError("an index of a traced step is out of range")
            self.calls[at](self.slots)
            at += 1
