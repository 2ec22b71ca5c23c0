"""A function on tensors that is recorded once and then run by the C++ library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.decode.lower import Lowering
from compress.decode.operations import handlers
from compress.decode.plan import steps_of
from compress.decode.trace import Recorder, trace

NOTHING = torch.empty(0)


class RecordedStep:
    """The instructions of a function for tensors of fixed shapes.

    first: the outputs of the call that was recorded. called: the operations that torch computes, by name.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor], state: Sequence[Tensor] = ()) -> None:
        """Call a function that returns a list of tensors, and record it.

        state: tensors that are no inputs, but may change: by the function or between its calls. All others from outside
        are constants. Raises NotRecordedError.
        """
        record, self.first = trace(function, inputs)
        with torch.inference_mode(False):  # tensors that are made in it cannot be changed by calls outside it
            self._plan(record, inputs, state)

    def _plan(self, record: Recorder, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> None:
        """Make the instructions and their memory."""
        self.inputs = [tensor.clone() for tensor in inputs]
        lowering = Lowering(record, self.inputs, state)
        outputs = lowering.lower(handlers())
        self.steps, memory, tensor = steps_of(lowering.planned, outputs, lowering.called, lowering.keep)
        self.called = lowering.names
        self._outputs: list[Callable[[], Tensor]] = [lambda value=value: tensor(value) for value in outputs]
        for node in record.graph.nodes:
            node.meta.clear()  # the results of the call
        buffers = [[b for b in memory.given.values() if b.is_at(one)] for one in state]
        self._state = [[memory.slots[id(buffer)] for buffer in some] for some in buffers]
        for buffer in (one for some in buffers for one in some):
            buffer.tensor = NOTHING  # the slots hold the tensors

    def release(self) -> None:
        """Forget the tensors that may change, until others are bound."""
        self.bind([NOTHING] * len(self._state))

    def bind(self, state: Sequence[Tensor]) -> None:
        """Let the step change other tensors of the same layout."""
        for slots, tensor in zip(self._state, state, strict=True):
            for slot in slots:
                self.steps.bind(slot, tensor)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The outputs for other inputs of the same shapes. Raises IndexError and MemoryError."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.steps.run(torch.get_num_threads())
        return [output().clone() for output in self._outputs]
