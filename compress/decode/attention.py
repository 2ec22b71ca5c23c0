"""Attention as an instruction. Keys that several heads share are not repeated in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from compress.decode.layout import NotRecordedError, Value
from compress.decode.lower import VIEWS, Lowering, as_view, is_view

aten = torch.ops.aten
RESHAPES = {aten.view.default, *VIEWS}
WIDENED = torch.bfloat16, torch.float32
"""A dtype of keys and values in a cache, and that of a model that computes with them."""


def feeds_attention(node: Node, through: Callable[[Any], bool] = RESHAPES.__contains__) -> bool:
    """Whether the keys or values of attention are all that a node is used for, after a change of shape.

    through: whether an operation is such a change.
    """
    users = list(node.users)
    if users and all(through(user.target) for user in users):
        return all(feeds_attention(user, through) for user in users)
    return bool(users) and all(user.target in ATTENTION and node in user.args[1:3] for user in users)


def converted(lowering: Lowering, node: Node, x: Value, **_: Any) -> Value:
    """A copy in the dtype of the result. Attention alone reads keys and values of a cache as they are stored."""
    dtype = node.meta["val"].dtype
    if (x.dtype, dtype) == WIDENED and feeds_attention(node, lambda t: t is aten.clone.default or is_view(t)):
        return x
    return lowering.map("copy", lowering.fresh(node.meta["val"].shape, dtype), [x])


def clone(lowering: Lowering, node: Node, x: Value, **_: Any) -> Value:
    """A copy, unless attention alone reads it: nothing changes keys between their copy and attention."""
    if len(x.sizes) == 5 and x.strides[2] == 0 and feeds_attention(node):
        return x
    return lowering.map("copy", lowering.fresh(x.sizes, x.dtype), [x])


def reshape(lowering: Lowering, node: Node, x: Value, sizes: Any) -> Any:
    """A view; repeated heads stay repeated for attention."""
    wanted = tuple(node.meta["val"].shape)
    if len(x.sizes) == 5 and x.strides[2] == 0 and x.sizes[2] > 1 and feeds_attention(node):
        batch, heads, repeats, *rest = x.sizes
        if wanted == (batch, heads * repeats, *rest):
            return Value(x.buffer, wanted, (0, 0, 0, 0), x.dtype, x.offset, shared=x)
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
    """softmax(q k^T scale + mask) v. Several queries of a head, or the heads that share a key, are taken together."""
    batch, heads, queries, width = q.sizes
    if dropout_p or (is_causal and k.sizes[2] > 1):
        raise NotRecordedError("attention with dropout or of later keys")
    if any(user.args[1] != 0 for user in node.users):
        raise NotRecordedError("statistics of attention")
    groups, keys, out_width = shared_heads(k, v, heads), k.sizes[2], v.sizes[3]
    repeats = heads // groups
    if repeats > 1 and queries > 1:
        raise NotRecordedError("attention of several queries with shared keys")
    order = (heads * out_width, out_width, out_width, 1) if queries == 1 else None
    out = lowering.fresh((batch, heads, queries, out_width), q.dtype, order)

    def together(value: Value, *rest: int) -> list[int]:  # the strides of sequences, heads of k, and queries of each
        across = value.strides[2] if queries > 1 else value.strides[1]
        return [value.strides[0], value.strides[1] * repeats, across, *rest]

    placed: list[Any] = [(q, together(q, 0, q.strides[3], 0))]
    for value, (of_k, of_v) in ((k, (1, 0)), (v, (0, 1))):
        s = value.shared.strides if value.shared is not None else (*value.strides[:2], 0, *value.strides[2:])
        placed.append((value, [s[0], s[1], 0, s[3], s[4] * of_k, s[4] * of_v]))
    mask = None if attn_mask is None else attn_mask.expanded((batch, heads, queries, keys))
    placed.append(None if mask is None else (mask, together(mask, mask.strides[3], 0, 0)))
    lowering.emit(
        "attend",
        (batch, groups, repeats * queries, keys, width, out_width),
        (out, together(out, 0, 0, 1)),
        placed,
        fields={"numbers": (width**-0.5 if scale is None else scale, 0.0)},
    )
    return out, None


def shared_heads(k: Value, v: Value, heads: int) -> int:
    """The heads of keys and values that several heads of queries share. Raises NotRecordedError."""
    counts = {value.sizes[1] if value.shared is None else value.shared.sizes[1] for value in (k, v)}
    groups = counts.pop()
    if counts or heads % groups:
        raise NotRecordedError("keys and values of different heads")
    return groups


ATTENTION: dict[Any, Callable[..., Any]] = {aten._scaled_dot_product_flash_attention_for_cpu.default: attend}
SHAPES: dict[Any, Callable[..., Any]] = {
    aten.clone.default: clone,
    aten._to_copy.default: converted,
    **dict.fromkeys(RESHAPES, reshape),
}
