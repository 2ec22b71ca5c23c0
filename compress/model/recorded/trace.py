"""The operations of a function on tensors, recorded while it runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from compress.kernels import recording
from compress.model.recorded.layout import NotRecordedError


def trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[GraphModule, list[Tensor]]:
    """Run a function once and record its operations. Returns the graph and the outputs.

    The function returns a list of tensors. Tensors that it changes are changed. Raises NotRecordedError for a function
    that depends on numbers in Python, or in the shapes of its tensors.
    """
    outputs: list[Tensor] = []

    def run(*tensors: Tensor) -> list[Tensor]:
        found = function(*tensors)
        outputs.extend(found)
        return found

    try:
        with recording.recorded(), torch.no_grad():
            graph = make_fx(run, tracing_mode="real", record_module_stack=False)(*inputs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise NotRecordedError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    graph.graph.eliminate_dead_code(has_effect)
    return graph, [plain(output) for output in outputs]


def has_effect(node: Node) -> bool:
    """Whether a node is more than its value: an input, an output, or an operation that changes a tensor."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op in ("placeholder", "output")
    return bool(schema_of(node).is_mutable)


def schema_of(node: Node) -> Any:
    """The schema of a node's operation."""
    target: Any = node.target
    return target._schema


def plain(tensor: Tensor) -> Tensor:
    """A tensor as it was before the trace wrapped it."""
    return tensor.detach()


def tensors_of(graph: GraphModule) -> dict[Node, Tensor]:
    """The tensors that a graph takes from outside by node: weights, constants, caches."""
    found = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            value: Any = graph
            for name in str(node.target).split("."):
                value = getattr(value, name)
            found[node] = value.data if isinstance(value, torch.nn.Parameter) else value
    return found
