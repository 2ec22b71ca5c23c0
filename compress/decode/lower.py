"""From recorded operations to instructions of the C++ library; what it lacks is called in torch."""

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

from compress.decode.layout import Buffer, NotRecordedError, Value, collapsed, contiguous_strides
from compress.decode.plan import Placed, Planned, check
from compress.decode.trace import Recorder, schema_of

LARGEST_FOLDED = 1 << 24
"""Bytes of a constant that is computed once; a larger one would be a second copy of a table."""

log = logging.getLogger(__name__)

UNFIT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
"""What calls of torch must not have: results whose shape or Python value depends on numbers, and chance."""

Handlers = Mapping[Any, Callable[..., Any]]
"""By operation of torch: a function of the lowering, the node, and its arguments, that returns its value."""


class Lowering:
    """The instructions of a step, planned operation by operation.

    values: the value of each node, or the values of its outputs. called: those of calls of torch by instruction, and
    names: their operations. keep: what the addresses of instructions need. written: nodes whose values are changed
    later.
    """

    def __init__(self, record: Recorder, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> None:
        """inputs: tensors for the inputs, which the step reads. state: tensors from outside that may change."""
        self.graph, self.planned, self.keep = record.graph, list[Planned](), list[Any]()
        self.values: dict[Node, Any] = {}
        self.called: dict[int, list[Value]] = {}
        self.names: list[str] = []
        self.written = written(record.graph)
        self.given_buffers: dict[tuple[int, torch.dtype, int], Buffer] = {}
        changing = {tensor.data_ptr() for tensor in state}
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node, tensor in zip(placeholders, inputs, strict=True):
            self.values[node] = self.given(tensor, constant=False)
        for node, tensor in record.outside.items():
            self.values[node] = self.given(tensor, constant=tensor.data_ptr() not in changing)

    # Values

    def given(self, tensor: Tensor, constant: bool = True) -> Value:
        """The value of a tensor from outside."""
        key = tensor.data_ptr(), tensor.dtype, tensor.nbytes
        buffer = self.given_buffers.setdefault(key, Buffer(tensor, tensor.nbytes))
        return Value(buffer, tuple(tensor.shape), tensor.stride(), tensor.dtype, 0, constant)

    def number(self, value: Any, dtype: torch.dtype) -> Value:
        """The value of a Python number."""
        return self.given(torch.tensor(value, dtype=dtype))

    def fresh(self, sizes: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Value:
        """A value in memory of its own."""
        value = Value(Buffer(None, 0), tuple(sizes), tuple(strides or contiguous_strides(sizes)), dtype)
        value.buffer.size = max(1, value.count) * dtype.itemsize
        return value

    def tensor_of(self, value: Value) -> Tensor:
        """The tensor of a constant value."""
        assert value.constant and value.buffer.tensor is not None
        return value.as_tensor(value.buffer.tensor)

    # Instructions

    def emit(
        self, name: str, sizes: Sequence[int], out: Placed | None, inputs: Sequence[Placed | None], **more: Any
    ) -> Planned:
        """Add an instruction. more: as in `Planned`. Raises NotRecordedError for what instructions do not have."""
        check([out, *inputs], sizes)
        made = Planned(name, sizes, out, inputs, **more)
        self.planned.append(made)
        return made

    def map(self, name: str, out: Value, inputs: Sequence[Value]) -> Value:
        """An operation of numbers at the same place of all inputs, repeated to the sizes of `out`."""
        given = [value.expanded(out.sizes) for value in inputs]
        shape = collapsed(out.sizes, [out.strides, *[value.strides for value in given]])
        floats = any(value.dtype.is_floating_point for value in (out, *inputs))
        first, *others = zip([out, *given], shape.strides, strict=True)
        self.emit(name, shape.sizes, first, others, fields={"whole": int(not floats)})
        return out

    def copied(self, value: Value, dtype: torch.dtype | None = None) -> Value:
        """A contiguous copy."""
        return self.map("copy", self.fresh(value.sizes, dtype or value.dtype), [value])

    # Nodes

    def lower(self, handlers: Handlers) -> list[Value]:
        """Plan the instructions of all nodes, and return the values of the outputs. Raises NotRecordedError."""
        for node in self.graph.nodes:
            if node.op == "output":
                outputs: Any = map_arg(node.args[0], self.values.__getitem__)
                return list(outputs)
            if node.op == "call_function" and node not in self.values:
                self.values[node] = self.value_of(node, handlers)
        raise AssertionError("a graph ends with its output")

    def value_of(self, node: Node, handlers: Handlers) -> Any:
        """The value of a node: of a constant, by its handler, as a view, or by a call of torch."""
        known: Any = map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
        args, kwargs = known
        if node.target is operator.getitem:
            return args[0][args[1]]
        if any(isinstance(value, Value) and value.constant for value in changed_by(node, args, kwargs)):
            raise NotRecordedError(f"{node.target} changes a constant")
        if (folded := self.folded(node, args, kwargs)) is not None:
            return folded
        handler = handlers.get(node.target) or (as_view if is_view(node.target) else None)
        planned = len(self.planned)
        if handler is not None:
            try:
                return handler(self, node, *args, **kwargs)
            except NotRecordedError as error:
                log.debug("%s is called in torch: %s", node.target, error)
                del self.planned[planned:]
        return self.call(node, args, kwargs)

    def folded(self, node: Node, args: Any, kwargs: Any) -> Value | None:
        """The value of a node whose inputs are constants, computed now; None for other nodes."""
        inputs = [self.values[n] for n in node.all_input_nodes]
        if not all(isinstance(v, Value) and v.constant for v in inputs) or schema_of(node).is_mutable:
            return None
        like = node.meta["val"]
        if (inputs and is_view(node.target)) or not isinstance(like, Tensor) or like.nbytes > LARGEST_FOLDED:
            return None
        constant = self.given(self.computed(node, args, kwargs, self.tensor_of).contiguous())
        return self.copied(constant) if node in self.written else constant

    def computed(self, node: Node, args: Any, kwargs: Any, tensor: Callable[[Value], Tensor]) -> Any:
        """What torch computes for a node. tensor: gives a value as a tensor."""
        known: Any = map_aggregate((args, kwargs), lambda v: tensor(v) if isinstance(v, Value) else v)
        target: Any = node.target
        return target(*known[0], **known[1])

    def call(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The value of a node that torch computes when the step runs. Raises NotRecordedError if that is not enough."""
        if depends_on_numbers(node, args):
            raise NotRecordedError(f"{node.target} depends on numbers")
        changed = changed_by(node, args, kwargs)
        if not all(isinstance(value, Value) for value in changed):
            raise NotRecordedError(f"{node.target} changes several tensors")
        like = node.meta["val"]
        several = not isinstance(like, Tensor)
        if changed and several:
            raise NotRecordedError(f"{node.target} changes several tensors")
        fresh = [] if changed else (like if several else [like])
        outs = [self.fresh(t.shape, t.dtype) if isinstance(t, Tensor) else None for t in fresh]

        def run(tensor: Callable[[Value], Tensor]) -> None:
            found = self.computed(node, args, kwargs, tensor)
            for result, out in zip((found if several else [found]) if outs else (), outs, strict=True):
                if out is not None:
                    tensor(out).copy_(result)

        self.called[len(self.planned)] = [v for v in [*tree_leaves((args, kwargs)), *outs] if isinstance(v, Value)]
        self.names.append(str(node.target))
        self.emit("caller", (), None, (), call=run)
        return changed[0] if changed else tuple(outs) if several else outs[0]


def depends_on_numbers(node: Node, args: Any) -> bool:
    """Whether shapes or Python values of results depend on numbers, or on chance."""
    target: Any = node.target
    if target is torch.ops.aten.index.Tensor and all(i is None or i.dtype is torch.int64 for i in args[1]):
        return False
    return any(tag in target.tags for tag in UNFIT)


def changed_by(node: Node, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation changes."""
    found = []
    for i, argument in enumerate(schema_of(node).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return found


def written(graph: Graph) -> set[Node]:
    """The nodes whose values a later operation changes, in place or through a view."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        changed = changed_by(node, node.args, node.kwargs)
        if node in found and is_view(node.target):
            changed = [*changed, node.args[0]]
        found |= {one for one in changed if isinstance(one, Node)}
    return found


VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default}
"""Operations that are views, though their schemas do not say so."""


def is_view(target: Any) -> bool:
    """Whether an operation only gives its input another shape."""
    if target in VIEWS:
        return True
    schema = target._schema
    alias = schema.arguments[0].alias_info if schema.arguments else None
    return alias is not None and not alias.is_write and not schema.is_mutable


def as_view(lowering: Lowering, node: Node, value: Value, *args: Any, **kwargs: Any) -> Any:
    """The value of a view; numbers are copied where no strides describe it."""
    for given in (value, None):
        source = given or lowering.copied(value)
        like = torch.empty_strided(source.sizes, source.strides, dtype=source.dtype, device="meta")
        try:
            target: Any = node.target
            return viewed(source, target(like, *args, **kwargs))
        except RuntimeError:
            continue
    raise NotRecordedError(f"{node.target} is no view of its input")


def viewed(value: Value, found: Any) -> Any:
    """The value, or values, with the strides of tensors that were made like it."""
    if isinstance(found, Tensor):
        before = value.offset * value.dtype.itemsize
        if before % found.dtype.itemsize:
            raise NotRecordedError("a view of unaligned bytes")
        offset = before // found.dtype.itemsize + int(found.storage_offset())
        return Value(value.buffer, tuple(found.shape), found.stride(), found.dtype, offset, value.constant)
    return tuple(viewed(value, one) for one in found)
