"""Attention of many queries on the CPU, and its torch operator."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.native.library import OUT_OF_MEMORY, Attention, available, instruction_set, library, pointer

MASKS = {torch.bool: 1, torch.float32: 2}  # compress_mask of compress_cpu.h


def attends(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shared: bool) -> bool:
    """Whether `attend` computes a call: of its dtypes, on the CPU, no gradients. shared: k may have fewer heads."""
    if q.dtype not in (torch.float32, torch.bfloat16):
        return False
    if not all(one.dtype is q.dtype and one.is_cpu and one.dim() == 4 for one in (q, k, v)):
        return False
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (q, k, v, mask)):
        return False
    (batch, heads, _, width), (groups, keys) = q.shape, k.shape[1:3]
    if k.shape[0] != batch or v.shape[:3] != k.shape[:3] or k.shape[3] != width or keys == 0 or width == 0:
        return False
    if groups != heads and (not shared or groups == 0 or heads % groups):
        return False
    if not available() or instruction_set() == "generic":  # whose vectors are shorter than those of torch
        return False
    return mask is None or (mask.dtype in (*MASKS, q.dtype) and mask.is_cpu and mask.dim() <= 4)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """softmax(q k^T scale + mask) v, [batch, heads, queries, width of v].

    q, k, v: float32 or bfloat16 [batch, heads, rows, width]; k and v may have fewer heads, which neighbours of q share.
    mask: bool, false for keys that are not seen, or float32 or of their dtype, broadcast to [batch, heads, queries,
    keys]. causal: query n sees the keys up to n. Queries that see no key get zeros. All is computed in float32. Raises
    MemoryError.
    """
    if q.dtype is torch.bfloat16:
        added = mask if mask is None or mask.dtype is torch.bool else mask.float()
        return attend(q.float(), k.float(), v.float(), added, causal, scale).to(q.dtype)
    native = library()
    assert native is not None
    batch, heads, queries, width = q.shape
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)  # as the layer after it reads it
    strides = (0, 0, 0)
    if mask is not None:
        mask = mask.expand(batch, heads, queries, k.shape[2])
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        strides = mask.stride()[:3]
    call = Attention(
        q=pointer(q),
        k=pointer(k),
        v=pointer(v),
        mask=pointer(mask),
        out=pointer(out),
        sizes=(batch, heads, queries, k.shape[2], width, v.shape[3]),
        groups=k.shape[1],
        scale=scale,
        q_strides=q.stride()[:3],
        k_strides=k.stride()[:3],
        v_strides=v.stride()[:3],
        out_strides=out.stride()[:3],
        mask_strides=strides,
        mask_type=0 if mask is None else MASKS[mask.dtype],
        causal=causal,
        threads=torch.get_num_threads(),
    )
    failed = native.compress_attend(call)
    if failed == OUT_OF_MEMORY:
        raise MemoryError("the buffers of a kernel do not fit into memory")
    assert not failed, "sizes of queries, keys and values do not fit together"
    return out


_LIBRARY = torch.library.Library("compress", "FRAGMENT")
_LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) -> Tensor")
_LIBRARY.impl("attend", attend, "CPU")


def _shape_of_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)


torch.library.register_fake("compress::attend", _shape_of_attention, lib=_LIBRARY)
