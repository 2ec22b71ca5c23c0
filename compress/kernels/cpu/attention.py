"""Attention of many queries on the CPU, and its torch operator."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.native.library import Attention, available, check_status, instruction_set, library, pointer

MASKS = {torch.bool: 1, torch.float32: 2}  # compress_mask of compress_cpu.h


def attends(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shares_heads: bool) -> bool:
    """Whether `attend` supports a call: on the CPU, in a supported dtype, without gradients.

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: attention mask, or None.
        shares_heads: whether keys may have fewer heads than queries.
    """
    if q.dtype not in (torch.float32, torch.bfloat16):
        return False
    if not all(tensor.dtype is q.dtype and tensor.is_cpu and tensor.dim() == 4 for tensor in (q, k, v)):
        return False
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (q, k, v, mask)):
        return False
    (batch, heads, _, width), (groups, keys) = q.shape, k.shape[1:3]
    if k.shape[0] != batch or v.shape[:3] != k.shape[:3] or k.shape[3] != width or keys == 0 or width == 0:
        return False
    if groups != heads and (not shares_heads or groups == 0 or heads % groups):
        return False
    if not available() or instruction_set() == "generic":  # torch has longer vectors
        return False
    return mask is None or (mask.dtype in (*MASKS, q.dtype) and mask.is_cpu and mask.dim() <= 4)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Compute softmax(q k^T scale + mask) v in float32.

    Args:
        q: float32 or bfloat16 [batch, heads, queries, width].
        k: [batch, key heads, keys, width]; neighbouring heads of q share a key head.
        v: [batch, key heads, keys, value width].
        mask: bool (False for masked keys), float32, or the dtype of q; broadcast to [batch, heads, queries, keys].
        causal: whether query n attends only to the keys up to n.
        scale: factor of the scores.

    Returns:
        [batch, heads, queries, value width]; zeros for queries whose keys are all masked.

    Raises:
        MemoryError: if the buffers do not fit into memory.
    """
    if q.dtype is torch.bfloat16:
        float_mask = mask if mask is None or mask.dtype is torch.bool else mask.float()
        return attend(q.float(), k.float(), v.float(), float_mask, causal, scale).to(q.dtype)
    native = library()
    assert native is not None
    batch, heads, queries, width = q.shape
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)  # the layout that the next layer reads
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
    status = native.compress_attend(call)
    check_status(status, "sizes of queries, keys and values do not fit together")
    return out


_LIBRARY = torch.library.Library("compress", "FRAGMENT")
_LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) -> Tensor")
_LIBRARY.impl("attend", attend, "CPU")


def _shape_of_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)


torch.library.register_fake("compress::attend", _shape_of_attention, lib=_LIBRARY)
