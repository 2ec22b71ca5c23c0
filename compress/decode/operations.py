"""The table of handlers that lower operations of torch to instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from compress.decode.attention import ATTENTION, SHAPES
from compress.decode.layout import UntraceableError, Value, collapse_dimensions
from compress.decode.lower import Lowering
from compress.decode.products import PRODUCTS

aten = torch.ops.aten

UNARY = (
    "neg",
    "abs",
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
    "relu",
    "logical_not",
)
"""Elementwise operations of one tensor."""
BINARY = (
    "add",
    "sub",
    "mul",
    "div",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "minimum",
    "maximum",
    "logical_and",
    "logical_or",
)
"""Elementwise operations of two tensors."""
BITWISE = {"bitwise_and": "logical_and", "bitwise_or": "logical_or"}
"""Bitwise operations, which are logical ones for booleans."""
IN_PLACE = ("add", "sub", "mul", "div")
"""Binary operations whose in-place variants have a handler."""


def empty_like(lowering: Lowering, node: Node) -> Value:
    """Create a value with the sizes and the dtype of a node's result."""
    return lowering.empty(node.meta["val"].shape, node.meta["val"].dtype)


def operands(lowering: Lowering, *arguments: Any) -> list[Value]:
    """Convert tensors and Python numbers of one operation to values."""
    values = [argument for argument in arguments if isinstance(argument, Value)]
    has_floats = any(argument.dtype.is_floating_point for argument in values) or any(
        isinstance(argument, float) for argument in arguments
    )
    dtype = torch.float32 if has_floats else torch.int64
    return [argument if isinstance(argument, Value) else lowering.scalar(argument, dtype) for argument in arguments]


def unary(name: str) -> Callable[..., Value]:
    """Return the handler of an elementwise operation of one tensor."""

    def handle(lowering: Lowering, node: Node, x: Value) -> Value:
        return lowering.map(name, empty_like(lowering, node), [x])

    return handle


def binary(name: str, is_in_place: bool = False) -> Callable[..., Value]:
    """Return the handler of an elementwise operation of two tensors.

    Args:
        name: name of the instruction.
        is_in_place: whether the first tensor is changed.
    """

    def handle(lowering: Lowering, node: Node, x: Any, y: Any, *, alpha: Any = 1, **options: Any) -> Value:
        if options:
            raise UntraceableError(f"{node.target} with {', '.join(options)}")
        if alpha != 1:
            if isinstance(y, Value):
                raise UntraceableError(f"{node.target} with a factor")
            y = y * alpha
        return lowering.map(name, x if is_in_place else empty_like(lowering, node), operands(lowering, x, y))

    return handle


def rsub(lowering: Lowering, node: Node, x: Value, y: Any, alpha: Any = 1) -> Value:
    """Lower y - x."""
    if alpha != 1:
        raise UntraceableError(f"{node.target} with a factor")
    return lowering.map("sub", empty_like(lowering, node), operands(lowering, y, x))


def logical_only(handler: Callable[..., Value]) -> Callable[..., Value]:
    """Wrap a handler so that it accepts booleans only."""

    def handle(lowering: Lowering, node: Node, *args: Any) -> Value:
        if any(isinstance(argument, Value) and argument.dtype is not torch.bool for argument in args):
            raise UntraceableError(f"{node.target} of integers")
        return handler(lowering, node, *args)

    return handle


def pow(lowering: Lowering, node: Node, x: Any, exponent: Any) -> Value:
    """Lower a power; squares are products."""
    if exponent == 2 and not isinstance(exponent, Value):
        name, inputs = ("square", [x]) if x.dtype.is_floating_point else ("mul", [x, x])
        return lowering.map(name, empty_like(lowering, node), inputs)
    if not node.meta["val"].dtype.is_floating_point:
        raise UntraceableError("a power of integers")
    return lowering.map("pow", empty_like(lowering, node), operands(lowering, x, exponent))


def gelu(lowering: Lowering, node: Node, x: Value, *, approximate: str = "none") -> Value:
    """Lower GELU, exact or with the tanh approximation."""
    return lowering.map("gelu" if approximate == "none" else "gelu_tanh", empty_like(lowering, node), [x])


def clamp(lowering: Lowering, node: Node, x: Value, low: Any = None, high: Any = None) -> Value:
    """Lower a clamp with numbers as limits, either of which may be missing."""
    if isinstance(low, Value) or isinstance(high, Value):
        raise UntraceableError("limits that are tensors")
    for name, limit in (("maximum", low), ("minimum", high)):
        if limit is not None:
            x = lowering.map(name, empty_like(lowering, node), operands(lowering, x, limit))
    return x


def where(lowering: Lowering, node: Node, mask: Value, x: Any, y: Any) -> Value:
    """Lower a choice: x where the mask is True, elsewhere y."""
    return lowering.map("where", empty_like(lowering, node), [mask, *operands(lowering, x, y)])


def masked_fill(lowering: Lowering, node: Node, x: Value, mask: Value, value: Any) -> Value:
    """Lower a masked fill: the number where the mask is True, elsewhere x."""
    return lowering.map("where", empty_like(lowering, node), [mask, *operands(lowering, value, x)])


def copy_(lowering: Lowering, node: Node, x: Value, y: Value, *_: Any) -> Value:
    """Lower a copy of y into x."""
    return lowering.map("copy", x, [y])


def cat(lowering: Lowering, node: Node, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Lower a concatenation to copies into slices of the result."""
    out, position = empty_like(lowering, node), 0
    dim %= len(out.sizes)
    for tensor in tensors:
        if len(tensor.sizes) != len(out.sizes):
            continue  # torch skips empty tensors of one dimension
        offset = out.offset + position * out.strides[dim]
        lowering.map("copy", Value(out.buffer, tensor.sizes, out.strides, out.dtype, offset), [tensor])
        position += tensor.sizes[dim]
    return out


def stack(lowering: Lowering, node: Node, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Lower a stack to copies into slices of the result along a new dimension."""
    out = empty_like(lowering, node)
    dim %= len(out.sizes)
    sizes, strides = (tuple(dimensions[:dim] + dimensions[dim + 1 :]) for dimensions in (out.sizes, out.strides))
    for i, tensor in enumerate(tensors):
        lowering.map("copy", Value(out.buffer, sizes, strides, out.dtype, out.offset + i * out.strides[dim]), [tensor])
    return out


def reduction(name: str) -> Callable[..., Value]:
    """Return the handler of a sum, mean or maximum over dimensions."""

    def handle(lowering: Lowering, node: Node, x: Value, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
        out, count = empty_like(lowering, node), len(x.sizes)
        if not (x.dtype.is_floating_point and out.dtype.is_floating_point):
            raise UntraceableError("a sum of integers")
        reduced_dims = {d % count for d in (dims or range(count))}
        remaining_dims = [d for d in range(count) if d not in reduced_dims]
        order = [*remaining_dims, *sorted(reduced_dims)]
        strides = [0] * count
        for position, d in enumerate(remaining_dims):
            strides[d] = out.strides[d if keepdim else position]
        shape = collapse_dimensions(
            [x.sizes[d] for d in order], [[s[d] for d in order] for s in (strides, x.strides)], len(reduced_dims)
        )
        if any(size != 1 and stride == 0 for size, stride in zip(shape.sizes[:-1], shape.strides[0], strict=False)):
            raise UntraceableError("a sum over dimensions that cannot be joined")
        lowering.emit(name, shape.sizes, (out, shape.strides[0]), [(x, shape.strides[1])])
        return out

    return handle


def softmax(lowering: Lowering, node: Node, x: Value, dim: int, _: Any = None, *, safe: bool = False) -> Value:
    """Lower a softmax.

    Args:
        lowering: the lowering.
        node: the node.
        x: input.
        dim: dimension of the softmax.
        safe: whether a row whose elements are all masked gives zeros instead of NaN.
    """
    out, count = empty_like(lowering, node), len(x.sizes)
    order = [*[d for d in range(count) if d != dim % count], dim % count]
    shape = collapse_dimensions([x.sizes[d] for d in order], [[v.strides[d] for d in order] for v in (out, x)], 1)
    lowering.emit("softmax", shape.sizes, (out, shape.strides[0]), [(x, shape.strides[1])], fields={"whole": int(safe)})
    return out


def layer_norm(
    lowering: Lowering, node: Node, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value | None, ...]:
    """Lower a layer norm whose statistics are not used."""
    if any(user.args[1] != 0 for user in node.users) or len(shape) != 1:
        raise UntraceableError("statistics of a layer norm")
    out = lowering.empty(x.sizes, node.meta["val"][0].dtype)
    affine = [None if v is None else v.expanded(x.sizes) for v in (weight, bias)]
    values = [v for v in (out, x, *affine) if v is not None]
    joined = collapse_dimensions(x.sizes, [v.strides for v in values], 1)
    strides = dict(zip(map(id, values), joined.strides, strict=True))
    strided = [None if v is None else (v, strides[id(v)]) for v in (out, x, *affine)]
    lowering.emit("native_layer_norm", joined.sizes, strided[0], strided[1:], fields={"numbers": (eps, 0.0)})
    return out, None, None


def select_along(lowering: Lowering, node: Node, table: Value, dim: int, index: Value) -> Value:
    """Select entries of one dimension of a table."""
    if index.dtype is not torch.int64:
        raise UntraceableError("an index that is no int64")
    index = index if index.contiguous else lowering.contiguous_copy(index)
    out, trailing = empty_like(lowering, node), len(table.sizes) - dim - 1
    leading_sizes, trailing_sizes = table.sizes[:dim], table.sizes[dim + 1 :]
    sizes = [*leading_sizes, index.count, *trailing_sizes]
    strides = [
        *out.strides[:dim],
        out.strides[len(out.sizes) - trailing - 1],
        *out.strides[len(out.sizes) - trailing :],
    ]
    index_strides = [0] * len(sizes)
    index_strides[dim] = 1
    lowering.emit(
        "index_select",
        sizes,
        (out, strides),
        [(index, index_strides), (table, table.strides)],
        fields={"along": dim, "limit": table.sizes[dim], "whole": int(not table.dtype.is_floating_point)},
    )
    return out


def embedding(lowering: Lowering, node: Node, table: Value, index: Value, *_: Any) -> Value:
    """Lower an embedding."""
    return select_along(lowering, node, table, 0, index)


def index_select(lowering: Lowering, node: Node, table: Value, dim: int, index: Value) -> Value:
    """Lower `index_select`."""
    return select_along(lowering, node, table, dim % len(table.sizes), index)


def index_tensor(lowering: Lowering, node: Node, table: Value, indices: Sequence[Value | None]) -> Value:
    """Lower table[index] with one index."""
    dims_and_indices = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(dims_and_indices) != 1:
        raise UntraceableError("several indices")
    return select_along(lowering, node, table, *dims_and_indices[0])


def index_copy(lowering: Lowering, node: Node, x: Value, dim: int, index: Value, source: Value) -> Value:
    """Lower an in-place copy to entries of one dimension of x."""
    if index.dtype is not torch.int64:
        raise UntraceableError("an index that is no int64")
    dim %= len(x.sizes)
    index_strides = [0] * len(x.sizes)
    index_strides[dim] = index.strides[0] if index.sizes else 0
    lowering.emit(
        "index_copy",
        source.sizes,
        (x, x.strides),
        [(index, index_strides), (source, source.strides)],
        fields={"along": dim, "limit": x.sizes[dim], "whole": int(not x.dtype.is_floating_point)},
    )
    return x


def index_put(
    lowering: Lowering, node: Node, x: Value, indices: Sequence[Value | None], source: Value, add: bool = False
) -> Value:
    """Lower x[index] = source with one index."""
    dims_and_indices = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(dims_and_indices) != 1 or add or len(dims_and_indices[0][1].sizes) != 1:
        raise UntraceableError("several indices")
    dim, index = dims_and_indices[0]
    sizes = (*x.sizes[:dim], index.count, *x.sizes[dim + 1 :])
    return index_copy(lowering, node, x, dim, index, source.expanded(sizes))


def handlers() -> dict[Any, Callable[..., Any]]:
    """Return the handlers by operation of torch."""
    handler_by_operation: dict[Any, Callable[..., Any]] = {**ATTENTION, **PRODUCTS}
    for name in UNARY:
        handler_by_operation[getattr(aten, name).default] = unary(name)
    for name in BINARY:
        handler_by_operation |= dict.fromkeys(_overloads(name), binary(name))
    for name, logical in BITWISE.items():
        handler_by_operation |= dict.fromkeys(_overloads(name), logical_only(binary(logical)))
    for name in IN_PLACE:
        handler_by_operation |= dict.fromkeys(_overloads(f"{name}_"), binary(name, is_in_place=True))
    return handler_by_operation | TABLE | SHAPES


def _overloads(name: str) -> list[Any]:
    """Return the overloads of an operation of two tensors, or of a tensor and a number."""
    packet = getattr(aten, name)
    return [getattr(packet, o) for o in packet.overloads() if o in ("Tensor", "Scalar", "default")]


TABLE: dict[Any, Callable[..., Any]] = {
    aten.pow.Tensor_Scalar: pow,
    aten.pow.Tensor_Tensor: pow,
    aten.rsub.Scalar: rsub,
    aten.rsub.Tensor: rsub,
    aten.gelu.default: gelu,
    aten.clamp.default: clamp,
    aten.where.self: where,
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill,
    aten.copy_.default: copy_,
    aten.bitwise_not.default: logical_only(unary("logical_not")),
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.mean.dim: reduction("mean"),
    aten.sum.dim_IntList: reduction("sum"),
    aten.amax.default: reduction("amax"),
    aten._softmax.default: softmax,
    aten._safe_softmax.default: partial(softmax, safe=True),
    aten.native_layer_norm.default: layer_norm,
    aten.embedding.default: embedding,
    aten.index_select.default: index_select,
    aten.index.Tensor: index_tensor,
    aten.index_copy_.default: index_copy,
    aten.index_put_.default: index_put,
}
