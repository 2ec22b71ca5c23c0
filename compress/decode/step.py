"""A function on tensors that is traced once and then run by the C++ library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.decode.lower import Lowering
from compress.decode.operations import handlers
from compress.decode.plan import build_steps
from compress.decode.trace import Tracer, trace

NOTHING = torch.empty(0)


class TracedStep:
    """The instructions of a function for tensors of fixed shapes.

    Attributes:
        first_outputs: outputs of the traced call.
        called: operations that torch computes, by name.
        inputs: tensors from which the instructions read the inputs.
        steps: the instructions with their memory.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor], state: Sequence[Tensor] = ()) -> None:
        """Call a function, and trace it.

        Args:
            function: function of `inputs` that returns a list of tensors.
            inputs: example inputs.
            state: other tensors that may change, by the function or between its calls. All other external tensors are
                constants.

        Raises:
            UntraceableError: for a function that cannot be traced.
        """
        record, self.first_outputs = trace(function, inputs)
        with torch.inference_mode(False):  # tensors that are made in it cannot be changed by calls outside it
            self._plan(record, inputs, state)

    def _plan(self, record: Tracer, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> None:
        """Create the instructions and their memory."""
        self.inputs = [tensor.clone() for tensor in inputs]
        lowering = Lowering(record, self.inputs, state)
        outputs = lowering.lower(handlers())
        self.steps, memory, tensor = build_steps(lowering.planned, outputs, lowering.called, lowering.keep)
        self.called = lowering.names
        self._outputs: list[Callable[[], Tensor]] = [lambda value=value: tensor(value) for value in outputs]
        for node in record.graph.nodes:
            node.meta.clear()  # the results of the call
        buffers = [[b for b in memory.external_buffers.values() if b.is_at(tensor)] for tensor in state]
        self._state = [[memory.slots[id(buffer)] for buffer in group] for group in buffers]
        for buffer in (tensor for group in buffers for tensor in group):
            buffer.tensor = NOTHING  # the slots hold the tensors

    def release(self) -> None:
        """Release the tensors of the state until others are bound."""
        self.bind([NOTHING] * len(self._state))

    def bind(self, state: Sequence[Tensor]) -> None:
        """Replace the tensors of the state by others of the same layout."""
        for slots, tensor in zip(self._state, state, strict=True):
            for slot in slots:
                self.steps.bind(slot, tensor)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Compute the outputs for other inputs of the same shapes.

        Raises:
            IndexError: for an index that is out of range.
            MemoryError: if the buffers do not fit into memory.
        """
        for buffer, tensor in zip(self.inputs, inputs, strict=True):
            buffer.copy_(tensor)
        self.steps.run(torch.get_num_threads())
        return [output().clone() for output in self._outputs]
