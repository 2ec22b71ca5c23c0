"""The operations of a function on tensors, recorded while it runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from compress.decode.layout import NotRecordedError
from compress.kernels import recording

READS = (torch.ops.aten._local_scalar_dense.default,)
"""Operations that give Python a number of a tensor."""
IDLE = (torch.ops.aten.detach_.default,)
"""Operations that do nothing without gradients."""


class Recorder(TorchDispatchMode):
    """Records operations as they are dispatched, in a graph of torch.fx; `meta["val"]` of a node is its result.

    outside: the tensors that are no results, by node: weights, constants, caches.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph, self.outside = Graph(), dict[Node, Tensor]()
        self.nodes = {id(tensor): self.graph.placeholder(f"input_{i}") for i, tensor in enumerate(inputs)}
        self.alive: list[Any] = [inputs]  # so that no other tensor gets the id of one of them
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in IDLE:
            return args[0]
        if torch.is_inference_mode_enabled():  # where torch dispatches operations that it otherwise divides before
            with self:
                found = func.decompose(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        found = func(*args, **(kwargs or {}))
        if func in READS:
            raise NotRecordedError("a number of a tensor decides in Python")
        known: Any = map_aggregate((args, kwargs or {}), lambda one: self.node(one) if isinstance(one, Tensor) else one)
        node = self.graph.call_function(func, *known)
        node.meta["val"] = found
        self.alive.append((args, kwargs, found))
        if isinstance(found, Tensor):
            self.result(found, node)
        elif isinstance(found, tuple | list):
            for i, one in enumerate(found):
                if isinstance(one, Tensor):
                    part = self.graph.call_function(operator.getitem, (node, i))
                    part.meta["val"] = one
                    self.result(one, part)
        return found

    def result(self, tensor: Tensor, node: Node) -> None:
        """Remember which node made a tensor."""
        self.nodes[id(tensor)] = node
        if not schema_of(node.args[0] if node.target is operator.getitem else node).is_mutable:  # type: ignore[arg-type]
            self.made.add(tensor.untyped_storage().data_ptr())

    def node(self, tensor: Tensor) -> Node:
        """The node of a tensor; a new one for one from outside. Raises NotRecordedError for a result in disguise."""
        found = self.nodes.get(id(tensor))
        if found is None:
            memory = tensor.untyped_storage().data_ptr()
            if memory in self.made and memory not in self.storages():
                raise NotRecordedError("a result is used in a way that torch does not tell")
            found = self.nodes[id(tensor)] = self.graph.create_node("get_attr", f"outside_{len(self.outside)}")
            self.outside[found] = tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor
            self.alive.append(tensor)
        return found

    def storages(self) -> set[int]:
        """The memory of tensors from outside, of which views may be made."""
        return {tensor.untyped_storage().data_ptr() for tensor in self.outside.values()}


def trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Recorder, list[Tensor]]:
    """Run a function once and record its operations. Returns the record and the outputs.

    The function returns a list of tensors. Tensors that it changes are changed. Raises NotRecordedError for a function
    that depends on numbers in Python.
    """
    recorder = Recorder(inputs)
    with recording.recorded(), torch.no_grad(), recorder:
        outputs = list(function(*inputs))
    recorder.graph.output([recorder.node(output) for output in outputs])
    for node in reversed(recorder.graph.nodes):
        if not node.users and not has_effect(node):
            recorder.graph.erase_node(node)
    return recorder, outputs


def has_effect(node: Node) -> bool:
    """Whether a node is more than its value: an input, an output, or an operation that changes a tensor."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "call_function"
    return bool(schema_of(node).is_mutable)


def schema_of(node: Node) -> Any:
    """The schema of a node's operation."""
    target: Any = node.target
    return target._schema
