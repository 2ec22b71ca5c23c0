"""Trace the operations of a function on tensors while it runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from compress.decode.layout import UntraceableError
from compress.kernels import recording

READS = (torch.ops.aten._local_scalar_dense.default,)
"""Operations that convert an element of a tensor to a Python number."""
NO_OPS = (torch.ops.aten.detach_.default,)
"""Operations that have no effect without gradients."""


class Tracer(TorchDispatchMode):
    """Trace operations as they are dispatched, in a graph of torch.fx; `meta["val"]` of a node is its result.

    Attributes:
        graph: the graph.
        external_tensors: tensors that are neither inputs nor results, by node: weights, constants and caches.
        nodes: node by id of its tensor.
        keep_alive: tensors that must stay alive so that their ids are not reused.
        result_storages: addresses of the storages of results.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph, self.external_tensors = Graph(), dict[Node, Tensor]()
        self.nodes = {id(tensor): self.graph.placeholder(f"input_{i}") for i, tensor in enumerate(inputs)}
        self.keep_alive: list[Any] = [inputs]
        self.result_storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NO_OPS:
            return args[0]
        if torch.is_inference_mode_enabled():  # torch does not decompose operations in inference mode
            with self:
                outputs = func.decompose(*args, **(kwargs or {}))
            if outputs is not NotImplemented:
                return outputs
        outputs = func(*args, **(kwargs or {}))
        if func in READS:
            raise UntraceableError("a number of a tensor decides in Python")
        arguments: Any = map_aggregate(
            (args, kwargs or {}), lambda item: self.node(item) if isinstance(item, Tensor) else item
        )
        node = self.graph.call_function(func, *arguments)
        node.meta["val"] = outputs
        self.keep_alive.append((args, kwargs, outputs))
        if isinstance(outputs, Tensor):
            self.record_result(outputs, node)
        elif isinstance(outputs, tuple | list):
            for i, item in enumerate(outputs):
                if isinstance(item, Tensor):
                    part = self.graph.call_function(operator.getitem, (node, i))
                    part.meta["val"] = item
                    self.record_result(item, part)
        return outputs

    def record_result(self, tensor: Tensor, node: Node) -> None:
        """Store the node that created a tensor."""
        self.nodes[id(tensor)] = node
        if not schema_of(node.args[0] if node.target is operator.getitem else node).is_mutable:  # type: ignore[arg-type]
            self.result_storages.add(tensor.untyped_storage().data_ptr())

    def node(self, tensor: Tensor) -> Node:
        """Return the node of a tensor; an external tensor gets a new one.

        Raises:
            UntraceableError: for a result that torch returned outside of dispatched operations.
        """
        node = self.nodes.get(id(tensor))
        if node is None:
            memory = tensor.untyped_storage().data_ptr()
            if memory in self.result_storages and memory not in self.external_storages():
                raise UntraceableError("a result is used in a way that torch does not dispatch")
            node = self.nodes[id(tensor)] = self.graph.create_node("get_attr", f"outside_{len(self.external_tensors)}")
            self.external_tensors[node] = tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor
            self.keep_alive.append(tensor)
        return node

    def external_storages(self) -> set[int]:
        """Return the addresses of the storages of external tensors, of which views may be taken."""
        return {tensor.untyped_storage().data_ptr() for tensor in self.external_tensors.values()}


def trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Tracer, list[Tensor]]:
    """Run a function once, and trace its operations. Tensors that it changes are changed.

    Args:
        function: function of `inputs` that returns a list of tensors.
        inputs: example inputs.

    Returns:
        The tracer and the outputs.

    Raises:
        UntraceableError: for a function whose Python code depends on data.
    """
    tracer = Tracer(inputs)
    with recording.recorded(), torch.no_grad(), tracer:
        outputs = list(function(*inputs))
    tracer.graph.output([tracer.node(output) for output in outputs])
    for node in reversed(tracer.graph.nodes):
        if not node.users and not has_effect(node):
            tracer.graph.erase_node(node)
    return tracer, outputs


def has_effect(node: Node) -> bool:
    """Return whether a node has an effect: an input, an output, or an operation that changes a tensor."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "call_function"
    return bool(schema_of(node).is_mutable)


def schema_of(node: Node) -> Any:
    """Return the schema of a node's operation."""
    target: Any = node.target
    return target._schema
