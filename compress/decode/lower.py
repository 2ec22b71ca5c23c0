"""Lower traced operations to instructions of the C++ library; operations without an instruction call torch."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils._pytree import tree_leaves

from compress.decode.layout import Buffer, UntraceableError, Value, collapse_dimensions, contiguous_strides
from compress.decode.plan import PlannedInstruction, StridedValue, check_operands
from compress.decode.trace import Tracer, schema_of

LARGEST_FOLDED = 1 << 24
"""Largest size in bytes of a folded constant; a larger constant would be a second copy of a table."""

log = logging.getLogger(__name__)

DATA_DEPENDENT_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
)
"""Tags of operations that cannot be called: the shape of their results depends on data, or they are random."""

Handlers = Mapping[Any, Callable[..., Any]]
"""By operation of torch: a function of the lowering, the node and its arguments that returns the value of the node."""


class Lowering:
    """Lower the operations of a graph to planned instructions.

    Attributes:
        graph: the traced graph.
        planned: the instructions.
        keep: objects that own the memory of addresses in instructions.
        values: the value of each node, or the values of its outputs.
        called: values that calls of torch use, by instruction.
        names: operations that torch computes.
        mutated: nodes whose values a later operation changes.
        external_buffers: buffers of external tensors.
    """

    def __init__(self, record: Tracer, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> None:
        """Create the values of the inputs and of the external tensors.

        Args:
            record: the traced graph.
            inputs: tensors that the step reads as inputs.
            state: external tensors that may change.
        """
        self.graph, self.planned, self.keep = record.graph, list[PlannedInstruction](), list[Any]()
        self.values: dict[Node, Any] = {}
        self.called: dict[int, list[Value]] = {}
        self.names: list[str] = []
        self.mutated = mutated_nodes(record.graph)
        self.external_buffers: dict[tuple[int, torch.dtype, int], Buffer] = {}
        changing = {tensor.data_ptr() for tensor in state}
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node, tensor in zip(placeholders, inputs, strict=True):
            self.values[node] = self.external(tensor, constant=False)
        for node, tensor in record.external_tensors.items():
            self.values[node] = self.external(tensor, constant=tensor.data_ptr() not in changing)

    # Values

    def external(self, tensor: Tensor, constant: bool = True) -> Value:
        """Return the value of an external tensor."""
        key = tensor.data_ptr(), tensor.dtype, tensor.nbytes
        buffer = self.external_buffers.setdefault(key, Buffer(tensor, tensor.nbytes))
        return Value(buffer, tuple(tensor.shape), tensor.stride(), tensor.dtype, 0, constant)

    def scalar(self, value: Any, dtype: torch.dtype) -> Value:
        """Return the value of a Python number."""
        return self.external(torch.tensor(value, dtype=dtype))

    def empty(self, sizes: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Value:
        """Create a value in new memory."""
        value = Value(Buffer(None, 0), tuple(sizes), tuple(strides or contiguous_strides(sizes)), dtype)
        value.buffer.size = max(1, value.count) * dtype.itemsize
        return value

    def tensor_of(self, value: Value) -> Tensor:
        """Return the tensor of a constant value."""
        assert value.constant and value.buffer.tensor is not None
        return value.as_tensor(value.buffer.tensor)

    # Instructions

    def emit(
        self,
        name: str,
        sizes: Sequence[int],
        out: StridedValue | None,
        inputs: Sequence[StridedValue | None],
        **options: Any,
    ) -> PlannedInstruction:
        """Add an instruction.

        Args:
            name: name of the operation.
            sizes: dimensions of the instruction.
            out: output operand, or None.
            inputs: input operands.
            options: further fields of `PlannedInstruction`.

        Raises:
            UntraceableError: for dtypes or dimensions that instructions do not support.
        """
        check_operands([out, *inputs], sizes)
        instruction = PlannedInstruction(name, sizes, out, inputs, **options)
        self.planned.append(instruction)
        return instruction

    def map(self, name: str, out: Value, inputs: Sequence[Value]) -> Value:
        """Add an elementwise operation; the inputs are broadcast to the sizes of `out`."""
        expanded = [value.expanded(out.sizes) for value in inputs]
        shape = collapse_dimensions(out.sizes, [out.strides, *[value.strides for value in expanded]])
        has_floats = any(value.dtype.is_floating_point for value in (out, *inputs))
        output_operand, *input_operands = zip([out, *expanded], shape.strides, strict=True)
        self.emit(name, shape.sizes, output_operand, input_operands, fields={"whole": int(not has_floats)})
        return out

    def contiguous_copy(self, value: Value, dtype: torch.dtype | None = None) -> Value:
        """Copy a value to contiguous memory."""
        return self.map("copy", self.empty(value.sizes, dtype or value.dtype), [value])

    # Nodes

    def lower(self, handlers: Handlers) -> list[Value]:
        """Plan the instructions of all nodes.

        Returns:
            The values of the outputs.

        Raises:
            UntraceableError: for an operation that cannot be lowered.
        """
        for node in self.graph.nodes:
            if node.op == "output":
                outputs: Any = map_arg(node.args[0], self.values.__getitem__)
                return list(outputs)
            if node.op == "call_function" and node not in self.values:
                self.values[node] = self.value_of(node, handlers)
        raise AssertionError("a graph ends with its output")

    def value_of(self, node: Node, handlers: Handlers) -> Any:
        """Lower a node: fold a constant, call its handler, create a view, or call torch."""
        operands: Any = map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
        args, kwargs = operands
        if node.target is operator.getitem:
            return args[0][args[1]]
        if any(isinstance(value, Value) and value.constant for value in mutated_arguments(node, args, kwargs)):
            raise UntraceableError(f"{node.target} changes a constant")
        if (folded := self.fold(node, args, kwargs)) is not None:
            return folded
        handler = handlers.get(node.target) or (as_view if is_view(node.target) else None)
        instruction_count = len(self.planned)
        if handler is not None:
            try:
                return handler(self, node, *args, **kwargs)
            except UntraceableError as error:
                log.debug("%s is called in torch: %s", node.target, error)
                del self.planned[instruction_count:]
        return self.call(node, args, kwargs)

    def fold(self, node: Node, args: Any, kwargs: Any) -> Value | None:
        """Compute a node whose inputs are constants; None for other nodes."""
        inputs = [self.values[n] for n in node.all_input_nodes]
        if not all(isinstance(v, Value) and v.constant for v in inputs) or schema_of(node).is_mutable:
            return None
        example = node.meta["val"]
        if (inputs and is_view(node.target)) or not isinstance(example, Tensor) or example.nbytes > LARGEST_FOLDED:
            return None
        constant = self.external(self.compute_in_torch(node, args, kwargs, self.tensor_of).contiguous())
        return self.contiguous_copy(constant) if node in self.mutated else constant

    def compute_in_torch(self, node: Node, args: Any, kwargs: Any, tensor: Callable[[Value], Tensor]) -> Any:
        """Compute a node in torch.

        Args:
            node: the node.
            args: its arguments, with values.
            kwargs: its keyword arguments, with values.
            tensor: converts a value to a tensor.
        """
        tensors: Any = map_aggregate((args, kwargs), lambda v: tensor(v) if isinstance(v, Value) else v)
        target: Any = node.target
        return target(*tensors[0], **tensors[1])

    def call(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Add a call of torch.

        Raises:
            UntraceableError: for an operation that depends on data or changes several tensors.
        """
        if is_data_dependent(node, args):
            raise UntraceableError(f"{node.target} depends on numbers")
        changed = mutated_arguments(node, args, kwargs)
        if not all(isinstance(value, Value) for value in changed):
            raise UntraceableError(f"{node.target} changes several tensors")
        example = node.meta["val"]
        is_sequence = not isinstance(example, Tensor)
        if changed and is_sequence:
            raise UntraceableError(f"{node.target} changes several tensors")
        results = [] if changed else (example if is_sequence else [example])
        outs = [self.empty(t.shape, t.dtype) if isinstance(t, Tensor) else None for t in results]

        def run(tensor: Callable[[Value], Tensor]) -> None:
            computed = self.compute_in_torch(node, args, kwargs, tensor)
            for result, out in zip((computed if is_sequence else [computed]) if outs else (), outs, strict=True):
                if out is not None:
                    tensor(out).copy_(result)

        self.called[len(self.planned)] = [v for v in [*tree_leaves((args, kwargs)), *outs] if isinstance(v, Value)]
        self.names.append(str(node.target))
        self.emit("caller", (), None, (), call=run)
        return changed[0] if changed else tuple(outs) if is_sequence else outs[0]


def is_data_dependent(node: Node, args: Any) -> bool:
    """Return whether the shapes of results depend on data, or the operation is random."""
    target: Any = node.target
    if target is torch.ops.aten.index.Tensor and all(i is None or i.dtype is torch.int64 for i in args[1]):
        return False
    return any(tag in target.tags for tag in DATA_DEPENDENT_TAGS)


def mutated_arguments(node: Node, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation changes."""
    mutated = []
    for i, argument in enumerate(schema_of(node).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            mutated.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return mutated


def mutated_nodes(graph: Graph) -> set[Node]:
    """Return the nodes whose values a later operation changes, in place or through a view."""
    mutated: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        arguments = mutated_arguments(node, node.args, node.kwargs)
        if node in mutated and is_view(node.target):
            arguments = [*arguments, node.args[0]]
        mutated |= {argument for argument in arguments if isinstance(argument, Node)}
    return mutated


VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default}
"""Views whose schemas do not declare an alias."""


def is_view(target: Any) -> bool:
    """Return whether an operation is a view of its input."""
    if target in VIEWS:
        return True
    schema = target._schema
    alias = schema.arguments[0].alias_info if schema.arguments else None
    return alias is not None and not alias.is_write and not schema.is_mutable


def as_view(lowering: Lowering, node: Node, value: Value, *args: Any, **kwargs: Any) -> Any:
    """Lower a view. The input is copied if no strides describe the view."""
    for candidate in (value, None):
        source = candidate or lowering.contiguous_copy(value)
        example = torch.empty_strided(source.sizes, source.strides, dtype=source.dtype, device="meta")
        try:
            target: Any = node.target
            return view_like(source, target(example, *args, **kwargs))
        except RuntimeError:
            continue
    raise UntraceableError(f"{node.target} is no view of its input")


def view_like(value: Value, example: Any) -> Any:
    """Return views of a value with the strides of the example tensors."""
    if isinstance(example, Tensor):
        byte_offset = value.offset * value.dtype.itemsize
        if byte_offset % example.dtype.itemsize:
            raise UntraceableError("a view of unaligned bytes")
        offset = byte_offset // example.dtype.itemsize + int(example.storage_offset())
        return Value(value.buffer, tuple(example.shape), example.stride(), example.dtype, offset, value.constant)
    return tuple(view_like(value, item) for item in example)
