"""The attention of prompts of a packed model by the C++ library, which takes half the time of torch's."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from compress.kernels import dispatch
from compress.kernels.cpu.attention import attends

MIN_TOKENS = 16
"""Smallest number of tokens whose attention the C++ library computes; decode steps use torch's operator."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Compute `scaled_dot_product_attention` of torch by the C++ library; None for a call that it does not support."""
    if dropout_p or (is_causal and attn_mask is not None) or query.shape[-2] < MIN_TOKENS:
        return None
    if not attends(query, key, value, attn_mask, enable_gqa):
        return None
    scale_factor = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.compress.attend(query, key, value, attn_mask, is_causal, scale_factor)


class PromptAttention(TorchFunctionMode):
    """Replace torch's attention by that of the C++ library for supported calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is scaled_dot_product_attention:
            output = attention(*args, **options)
            if output is not None:
                return output
        return func(*args, **options)


class OpenCalls(threading.local):
    """The forward passes of this thread, with the mode that computes their attention."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, PromptAttention | None]] = []


OPEN_CALLS = OpenCalls()
"""Forward passes with a hook of `install` that have not ended."""


def install(model: nn.Module) -> None:
    """Compute the attention of prompts by the C++ library."""
    model.register_forward_pre_hook(_begin, with_kwargs=True)
    model.register_forward_hook(_end, always_call=True)


def _begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    tokens = args[0] if args else kwargs.get(getattr(model, "main_input_name", "input_ids"))
    mode = PromptAttention() if _is_prompt(kwargs.get("inputs_embeds") if tokens is None else tokens) else None
    if mode is not None:
        mode.__enter__()
    OPEN_CALLS.calls.append((model, mode))


def _end(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    # Another hook may have failed before `_begin`.
    if torch.compiler.is_compiling() or not OPEN_CALLS.calls or OPEN_CALLS.calls[-1][0] is not model:
        return
    _, mode = OPEN_CALLS.calls.pop()
    if mode is not None:
        mode.__exit__(None, None, None)


def _is_prompt(tokens: Any) -> bool:
    """Return whether the input of a model has many tokens on the CPU, without gradients and not in plain torch."""
    if torch.is_grad_enabled() or dispatch.in_plain_torch():
        return False
    return isinstance(tokens, Tensor) and tokens.is_cpu and tokens.dim() > 1 and tokens.shape[1] >= MIN_TOKENS
