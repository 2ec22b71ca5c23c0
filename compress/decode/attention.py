"""Attention as an instruction. Keys and values that several heads share are not repeated in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from compress.decode.layout import UntraceableError, Value
from compress.decode.lower import VIEWS, Lowering, as_view, is_view

aten = torch.ops.aten
RESHAPES = {aten.view.default, *VIEWS}
CACHE_CONVERSION = torch.bfloat16, torch.float32
"""The dtypes of a cached key or value and of a model that computes in a wider dtype."""


def feeds_attention(node: Node, is_passthrough: Callable[[Any], bool] = RESHAPES.__contains__) -> bool:
    """Return whether a node is used only as keys or values of attention.

    Args:
        node: node of the graph.
        is_passthrough: whether an operation between the node and attention is ignored, such as a reshape.
    """
    users = list(node.users)
    if users and all(is_passthrough(user.target) for user in users):
        return all(feeds_attention(user, is_passthrough) for user in users)
    return bool(users) and all(user.target in ATTENTION and node in user.args[1:3] for user in users)


def to_copy(lowering: Lowering, node: Node, x: Value, **_: Any) -> Value:
    """Lower a cast. Keys and values of a cache that only attention reads are not cast."""
    dtype = node.meta["val"].dtype
    if (x.dtype, dtype) == CACHE_CONVERSION and feeds_attention(node, lambda t: t is aten.clone.default or is_view(t)):
        return x
    return lowering.map("copy", lowering.empty(node.meta["val"].shape, dtype), [x])


def clone(lowering: Lowering, node: Node, x: Value, **_: Any) -> Value:
    """Lower a copy. Keys and values that only attention reads are not copied; nothing changes them in between."""
    if len(x.sizes) == 5 and x.strides[2] == 0 and feeds_attention(node):
        return x
    return lowering.map("copy", lowering.empty(x.sizes, x.dtype), [x])


def reshape(lowering: Lowering, node: Node, x: Value, sizes: Any) -> Any:
    """Lower a view. Repeated heads that only attention reads are not materialized."""
    sizes_out = tuple(node.meta["val"].shape)
    if len(x.sizes) == 5 and x.strides[2] == 0 and x.sizes[2] > 1 and feeds_attention(node):
        batch, heads, repeats, *trailing = x.sizes
        if sizes_out == (batch, heads * repeats, *trailing):
            return Value(x.buffer, sizes_out, (0, 0, 0, 0), x.dtype, x.offset, shared=x)
    return as_view(lowering, node, x, sizes)


def attend(
    lowering: Lowering,
    node: Node,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value | None, ...]:
    """Lower softmax(q k^T scale + mask) v.

    Several queries of a head, or the heads that share a key, are computed together.

    Raises:
        UntraceableError: for attention that the instruction does not support.
    """
    batch, heads, queries, width = q.sizes
    if dropout_p or (is_causal and k.sizes[2] > 1):
        raise UntraceableError("attention with dropout or of later keys")
    if any(user.args[1] != 0 for user in node.users):
        raise UntraceableError("statistics of attention")
    groups, keys, out_width = shared_heads(k, v, heads), k.sizes[2], v.sizes[3]
    repeats = heads // groups
    if repeats > 1 and queries > 1:
        raise UntraceableError("attention of several queries with shared keys")
    order = (heads * out_width, out_width, out_width, 1) if queries == 1 else None
    output = lowering.empty((batch, heads, queries, out_width), q.dtype, order)

    def merged_strides(value: Value, *further_strides: int) -> list[int]:  # of sequences, key heads, and queries
        query_stride = value.strides[2] if queries > 1 else value.strides[1]
        return [value.strides[0], value.strides[1] * repeats, query_stride, *further_strides]

    operands: list[Any] = [(q, merged_strides(q, 0, q.strides[3], 0))]
    for value, (is_key, is_value) in ((k, (1, 0)), (v, (0, 1))):
        strides = value.shared.strides if value.shared is not None else (*value.strides[:2], 0, *value.strides[2:])
        operands.append((value, [strides[0], strides[1], 0, strides[3], strides[4] * is_key, strides[4] * is_value]))
    mask = None if attn_mask is None else attn_mask.expanded((batch, heads, queries, keys))
    operands.append(None if mask is None else (mask, merged_strides(mask, mask.strides[3], 0, 0)))
    lowering.emit(
        "attend",
        (batch, groups, repeats * queries, keys, width, out_width),
        (output, merged_strides(output, 0, 0, 1)),
        operands,
        fields={"numbers": (width**-0.5 if scale is None else scale, 0.0)},
    )
    return output, None


def shared_heads(k: Value, v: Value, heads: int) -> int:
    """Return the number of heads of keys and values.

    Raises:
        UntraceableError: for keys and values with different numbers of heads.
    """
    counts = {value.sizes[1] if value.shared is None else value.shared.sizes[1] for value in (k, v)}
    groups = counts.pop()
    if counts or heads % groups:
        raise UntraceableError("keys and values of different heads")
    return groups


ATTENTION: dict[Any, Callable[..., Any]] = {aten._scaled_dot_product_flash_attention_for_cpu.default: attend}
SHAPES: dict[Any, Callable[..., Any]] = {
    aten.clone.default: clone,
    aten._to_copy.default: to_copy,
    **dict.fromkeys(RESHAPES, reshape),
}
