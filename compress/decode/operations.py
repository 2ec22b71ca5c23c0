"""How operations of torch become instructions: a table by operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from compress.decode.attention import ATTENTION, SHAPES
from compress.decode.layout import NotRecordedError, Value, collapsed
from compress.decode.lower import Lowering
from compress.decode.products import PRODUCTS

aten = torch.ops.aten

ONE: dict[str, str] = {
    "neg": "negative",
    "abs": "absolute",
    "sqrt": "root",
    "rsqrt": "inverse_root",
    "reciprocal": "inverse",
    "exp": "exp",
    "log": "log",
    "sin": "sin",
    "cos": "cos",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "relu": "relu",
    "logical_not": "not",
}
"""Operations of one number by their names in torch."""
TWO: dict[str, str] = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "lt": "below",
    "le": "at_most",
    "gt": "above",
    "ge": "at_least",
    "eq": "equal",
    "ne": "unequal",
    "minimum": "lesser",
    "maximum": "greater",
    "logical_and": "and",
    "logical_or": "or",
    "bitwise_and": "and",
    "bitwise_or": "or",
}
"""Operations of two numbers by their names in torch."""
OF_BITS = ("bitwise_and", "bitwise_or")
"""Those that are logic for booleans alone."""


def like(lowering: Lowering, node: Node) -> Value:
    """The value that a node makes: a new one with its sizes and dtype."""
    return lowering.fresh(node.meta["val"].shape, node.meta["val"].dtype)


def operands(lowering: Lowering, *given: Any) -> list[Value]:
    """Values of tensors and Python numbers that are computed together."""
    values = [one for one in given if isinstance(one, Value)]
    floats = any(one.dtype.is_floating_point for one in values) or any(isinstance(one, float) for one in given)
    dtype = torch.float32 if floats else torch.int64
    return [one if isinstance(one, Value) else lowering.number(one, dtype) for one in given]


def of_one(name: str) -> Callable[..., Value]:
    """The handler of an operation of one number."""

    def handle(lowering: Lowering, node: Node, x: Value) -> Value:
        return lowering.map(name, like(lowering, node), [x])

    return handle


def of_two(name: str, place: bool = False) -> Callable[..., Value]:
    """The handler of an operation of two numbers. place: the first one is changed."""

    def handle(lowering: Lowering, node: Node, x: Any, y: Any, *, alpha: Any = 1, **other: Any) -> Value:
        if other:
            raise NotRecordedError(f"{node.target} with {', '.join(other)}")
        if alpha != 1:
            if isinstance(y, Value):
                raise NotRecordedError(f"{node.target} with a factor")
            y = y * alpha
        return lowering.map(name, x if place else like(lowering, node), operands(lowering, x, y))

    return handle


def subtracted_from(lowering: Lowering, node: Node, x: Value, y: Any, alpha: Any = 1) -> Value:
    """y - x."""
    if alpha != 1:
        raise NotRecordedError(f"{node.target} with a factor")
    return lowering.map("subtract", like(lowering, node), operands(lowering, y, x))


def booleans(handler: Callable[..., Value]) -> Callable[..., Value]:
    """A handler that takes booleans alone."""

    def handle(lowering: Lowering, node: Node, *args: Any) -> Value:
        if any(isinstance(one, Value) and one.dtype is not torch.bool for one in args):
            raise NotRecordedError(f"{node.target} of integers")
        return handler(lowering, node, *args)

    return handle


def power(lowering: Lowering, node: Node, x: Any, exponent: Any) -> Value:
    """x to a power; squares are products."""
    if exponent == 2 and not isinstance(exponent, Value):
        name, given = ("square", [x]) if x.dtype.is_floating_point else ("multiply", [x, x])
        return lowering.map(name, like(lowering, node), given)
    if not node.meta["val"].dtype.is_floating_point:
        raise NotRecordedError("a power of integers")
    return lowering.map("power", like(lowering, node), operands(lowering, x, exponent))


def gelu(lowering: Lowering, node: Node, x: Value, *, approximate: str = "none") -> Value:
    """x times the normal distribution function of x, or its approximation by tanh."""
    return lowering.map("gelu" if approximate == "none" else "gelu_tanh", like(lowering, node), [x])


def clamp(lowering: Lowering, node: Node, x: Value, low: Any = None, high: Any = None) -> Value:
    """x between two numbers, either of which may be missing."""
    if isinstance(low, Value) or isinstance(high, Value):
        raise NotRecordedError("limits that are tensors")
    for name, limit in (("greater", low), ("lesser", high)):
        if limit is not None:
            x = lowering.map(name, like(lowering, node), operands(lowering, x, limit))
    return x


def choose(lowering: Lowering, node: Node, mask: Value, x: Any, y: Any) -> Value:
    """x where the mask is set, elsewhere y."""
    return lowering.map("choose", like(lowering, node), [mask, *operands(lowering, x, y)])


def masked_fill(lowering: Lowering, node: Node, x: Value, mask: Value, value: Any) -> Value:
    """A number where the mask is set, elsewhere x."""
    return lowering.map("choose", like(lowering, node), [mask, *operands(lowering, value, x)])


def copied_into(lowering: Lowering, node: Node, x: Value, y: Value, *_: Any) -> Value:
    """x with the numbers of y; x is changed."""
    return lowering.map("copy", x, [y])


def cat(lowering: Lowering, node: Node, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Copies into parts of the result."""
    out, at = like(lowering, node), 0
    dim %= len(out.sizes)
    for one in tensors:
        if len(one.sizes) != len(out.sizes):
            continue  # torch skips empty tensors of one dimension
        offset = out.offset + at * out.strides[dim]
        lowering.map("copy", Value(out.buffer, one.sizes, out.strides, out.dtype, offset), [one])
        at += one.sizes[dim]
    return out


def stack(lowering: Lowering, node: Node, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Copies into parts of the result, along a new dimension."""
    out = like(lowering, node)
    dim %= len(out.sizes)
    sizes, strides = (tuple(one[:dim] + one[dim + 1 :]) for one in (out.sizes, out.strides))
    for i, one in enumerate(tensors):
        lowering.map("copy", Value(out.buffer, sizes, strides, out.dtype, out.offset + i * out.strides[dim]), [one])
    return out


def reduced(name: str) -> Callable[..., Value]:
    """The handler of a sum, mean or maximum over dimensions."""

    def handle(lowering: Lowering, node: Node, x: Value, dims: Any = None, keep: bool = False, **_: Any) -> Value:
        out, count = like(lowering, node), len(x.sizes)
        if not (x.dtype.is_floating_point and out.dtype.is_floating_point):
            raise NotRecordedError("a sum of integers")
        over = {d % count for d in (dims or range(count))}
        kept = [d for d in range(count) if d not in over]
        order = [*kept, *sorted(over)]
        strides = [0] * count
        for place, d in enumerate(kept):
            strides[d] = out.strides[d if keep else place]
        shape = collapsed([x.sizes[d] for d in order], [[s[d] for d in order] for s in (strides, x.strides)], len(over))
        if any(size != 1 and stride == 0 for size, stride in zip(shape.sizes[:-1], shape.strides[0], strict=False)):
            raise NotRecordedError("a sum over dimensions that cannot be joined")
        lowering.emit(name, shape.sizes, (out, shape.strides[0]), [(x, shape.strides[1])])
        return out

    return handle


def softmax(lowering: Lowering, node: Node, x: Value, dim: int, _: Any = None, *, safe: bool = False) -> Value:
    """Softmax. safe: zeros where everything is masked, otherwise NaN."""
    out, count = like(lowering, node), len(x.sizes)
    order = [*[d for d in range(count) if d != dim % count], dim % count]
    shape = collapsed([x.sizes[d] for d in order], [[v.strides[d] for d in order] for v in (out, x)], 1)
    lowering.emit("softmax", shape.sizes, (out, shape.strides[0]), [(x, shape.strides[1])], fields={"whole": int(safe)})
    return out


def layer_norm(
    lowering: Lowering, node: Node, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value | None, ...]:
    """The normalized rows; the statistics are not there."""
    if any(user.args[1] != 0 for user in node.users) or len(shape) != 1:
        raise NotRecordedError("statistics of a layer norm")
    out = lowering.fresh(x.sizes, node.meta["val"][0].dtype)
    others = [None if v is None else v.expanded(x.sizes) for v in (weight, bias)]
    known = [v for v in (out, x, *others) if v is not None]
    found = collapsed(x.sizes, [v.strides for v in known], 1)
    strides = dict(zip(map(id, known), found.strides, strict=True))
    placed = [None if v is None else (v, strides[id(v)]) for v in (out, x, *others)]
    lowering.emit("normalize", found.sizes, placed[0], placed[1:], fields={"numbers": (eps, 0.0)})
    return out, None, None


def taken(lowering: Lowering, node: Node, table: Value, dim: int, index: Value) -> Value:
    """Places of one dimension of a table."""
    if index.dtype is not torch.int64:
        raise NotRecordedError("an index that is no int64")
    index = index if index.contiguous else lowering.copied(index)
    out, rest = like(lowering, node), len(table.sizes) - dim - 1
    before, after = table.sizes[:dim], table.sizes[dim + 1 :]
    sizes = [*before, index.count, *after]
    strides = [*out.strides[:dim], out.strides[len(out.sizes) - rest - 1], *out.strides[len(out.sizes) - rest :]]
    along = [0] * len(sizes)
    along[dim] = 1
    lowering.emit(
        "take",
        sizes,
        (out, strides),
        [(index, along), (table, table.strides)],
        fields={"along": dim, "limit": table.sizes[dim], "whole": int(not table.dtype.is_floating_point)},
    )
    return out


def embedding(lowering: Lowering, node: Node, table: Value, index: Value, *_: Any) -> Value:
    """Rows of a table."""
    return taken(lowering, node, table, 0, index)


def index_select(lowering: Lowering, node: Node, table: Value, dim: int, index: Value) -> Value:
    """Places of one dimension."""
    return taken(lowering, node, table, dim % len(table.sizes), index)


def indexed(lowering: Lowering, node: Node, table: Value, indices: Sequence[Value | None]) -> Value:
    """table[index], with one index."""
    known = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(known) != 1:
        raise NotRecordedError("several indices")
    return taken(lowering, node, table, *known[0])


def put(lowering: Lowering, node: Node, x: Value, dim: int, index: Value, source: Value) -> Value:
    """x with other numbers at places of one dimension; x is changed."""
    if index.dtype is not torch.int64:
        raise NotRecordedError("an index that is no int64")
    dim %= len(x.sizes)
    along = [0] * len(x.sizes)
    along[dim] = index.strides[0] if index.sizes else 0
    lowering.emit(
        "put",
        source.sizes,
        (x, x.strides),
        [(index, along), (source, source.strides)],
        fields={"along": dim, "limit": x.sizes[dim], "whole": int(not x.dtype.is_floating_point)},
    )
    return x


def put_index(
    lowering: Lowering, node: Node, x: Value, indices: Sequence[Value | None], source: Value, add: bool = False
) -> Value:
    """x[index] = source, with one index."""
    known = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(known) != 1 or add or len(known[0][1].sizes) != 1:
        raise NotRecordedError("several indices")
    dim, index = known[0]
    sizes = (*x.sizes[:dim], index.count, *x.sizes[dim + 1 :])
    return put(lowering, node, x, dim, index, source.expanded(sizes))


def handlers() -> dict[Any, Callable[..., Any]]:
    """The handlers by operation of torch."""
    found: dict[Any, Callable[..., Any]] = {**ATTENTION, **PRODUCTS}
    for name, known in ONE.items():
        found[getattr(aten, name).default] = of_one(known)
    for name, known in TWO.items():
        packet = getattr(aten, name)
        for overload in packet.overloads():
            if overload in ("Tensor", "Scalar", "default"):
                made = of_two(known)
                found[getattr(packet, overload)] = booleans(made) if name in OF_BITS else made
        changing = getattr(aten, f"{name}_", None)
        for overload in changing.overloads() if changing is not None and name in ("add", "sub", "mul", "div") else ():
            if overload in ("Tensor", "Scalar"):
                found[getattr(changing, overload)] = of_two(known, place=True)
    return found | TABLE | SHAPES


TABLE: dict[Any, Callable[..., Any]] = {
    aten.pow.Tensor_Scalar: power,
    aten.pow.Tensor_Tensor: power,
    aten.rsub.Scalar: subtracted_from,
    aten.rsub.Tensor: subtracted_from,
    aten.gelu.default: gelu,
    aten.clamp.default: clamp,
    aten.where.self: choose,
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill,
    aten.copy_.default: copied_into,
    aten.bitwise_not.default: booleans(of_one("not")),
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.mean.dim: reduced("mean"),
    aten.sum.dim_IntList: reduced("sum"),
    aten.amax.default: reduced("largest"),
    aten._softmax.default: softmax,
    aten._safe_softmax.default: partial(softmax, safe=True),
    aten.native_layer_norm.default: layer_norm,
    aten.embedding.default: embedding,
    aten.index_select.default: index_select,
    aten.index.Tensor: indexed,
    aten.index_copy_.default: put,
    aten.index_put_.default: put_index,
}
