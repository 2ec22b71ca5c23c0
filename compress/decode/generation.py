"""transformers' `generate` with traced decoding: a static cache where the call allows it, and its traced steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.decode.arguments import StepArguments
from compress.decode.caches import LENGTHS as LENGTHS
from compress.decode.caches import DecodingCache, DecodingWindow, GrowingLayer
from compress.decode.decoding import TracedDecoding
from compress.kernels import dispatch
from compress.models.cache_size import cache_bytes
from compress.models.computation import widened_from
from compress.models.kinds.contract import text_config

LARGEST_CACHE = 1 << 30
"""Largest size in bytes of a static cache for the longest text of a call; a larger cache grows with the text."""
MODES = "greedy_search", "sample"
"""Supported generation modes; steps of beam search, and of the model that checks a draft, have other shapes."""
HOOKS = (
    "_prepare_cache_for_generation",
    "_valid_auto_compile_criteria",
    "get_compiled_call",
    "prepare_inputs_for_generation",
)
"""The methods of transformers that create the cache of a call, its decode steps and their arguments."""
NAMES = "generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length"


class TracedGeneration:
    """The traced decoding of a model's `generate`.

    transformers handles a call with a cache object or a cache name, with beam search or assisted generation, and with a
    cache that would be larger than `LARGEST_CACHE`. It also handles calls in plain torch (`dispatch.plain_torch`), and
    drafts by a model with sliding windows.

    Attributes:
        model: the model.
        decoding: forward pass of decode steps.
        arguments: prepares the arguments of decode steps.
    """

    def __init__(self, model: PreTrainedModel, fallback: Callable[..., Any] | None = None) -> None:
        """Create the traced decoding.

        Args:
            model: the model.
            fallback: computes steps that are not traced; None for the model.
        """
        self.model = model
        self.decoding = TracedDecoding(model, fallback)
        self.arguments = StepArguments(model)
        self.embeddings: list[Any] = []

    def install(self) -> bool:
        """Install the hooks of `model.generate`.

        Returns:
            Whether this version of transformers supports the hooks.
        """
        model_class: Any = type(self.model)
        prepare = getattr(model_class, HOOKS[0], None)
        if prepare is None or not all(hasattr(model_class, name) for name in HOOKS):
            return False
        if tuple(inspect.signature(prepare).parameters)[1:] != NAMES:
            return False
        hooks = self.prepare_cache, self.is_traced, self.call_of, self.arguments_of
        vars(self.model).update(zip(HOOKS, hooks, strict=True))
        return True

    def prepare_cache(self, config: Any, model_kwargs: dict[str, Any], mode: Any, batch: int, length: int) -> None:
        """Create the cache of a call, and add it to `model_kwargs`."""
        embeddings = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        replaced = any(new is not old for new, old in zip(embeddings, self.embeddings, strict=False))
        if replaced or len(self.embeddings) != len(embeddings):
            self.decoding.forget()  # embedding and LM head can be replaced, as by `resize_token_embeddings`
            self.embeddings = embeddings
        # Steps that are not traced would cast all keys and values every time.
        dtype = cache_dtype(self.model) if self.decoding.reason is None else self.model.dtype
        if self.fits(config, model_kwargs, mode) and cache_bytes(self.model, batch, length, dtype) <= LARGEST_CACHE:
            cache = fixed_cache(self.model, -(-length // LENGTHS) * LENGTHS, dtype)
            # Drafts are cropped, which a full window allows only if it keeps older tokens.
            has_windows = cache is not None and any(isinstance(layer, DecodingWindow) for layer in cache.layers)
            if cache is not None and not (has_windows and getattr(config, "is_assistant", False)):
                model_kwargs["past_key_values"] = cache
                return
        getattr(type(self.model), HOOKS[0])(self.model, config, model_kwargs, mode, batch, length)

    def fits(self, config: Any, model_kwargs: dict[str, Any], mode: Any) -> bool:
        """Return whether a call decodes by traced steps."""
        model: Any = self.model
        if model_kwargs.get("past_key_values") is not None or config.use_cache is False or dispatch.in_plain_torch():
            return False
        if config.cache_implementation is not None or mode not in MODES or model.config.is_encoder_decoder:
            return False
        on_cpu = next(model.parameters()).device.type == "cpu" and not torch.is_grad_enabled()
        return on_cpu and model._supports_default_dynamic_cache()

    def is_traced(self, model_kwargs: dict[str, Any], config: Any) -> bool:
        """Return whether the steps of a call are those of `call_of`."""
        if isinstance(model_kwargs.get("past_key_values"), DecodingCache):
            return True
        return bool(getattr(type(self.model), HOOKS[1])(self.model, model_kwargs, config))

    def call_of(self, config: Any) -> Callable[..., Any]:
        """Return the forward pass of decode steps."""
        return self.decoding

    def arguments_of(self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
        """Prepare the arguments of a forward pass. transformers inspects the names of the parameters."""
        model_kwargs = kwargs if inputs_embeds is None else {**kwargs, "inputs_embeds": inputs_embeds}
        cache = kwargs.get("past_key_values")
        if isinstance(cache, DecodingCache):
            cache.reserve(kwargs.get("next_sequence_length") or 0)
            return self.arguments(input_ids, model_kwargs)
        return self.arguments.prepare_with_transformers(input_ids, model_kwargs)


def fixed_cache(model: PreTrainedModel, length: int, dtype: torch.dtype) -> DecodingCache | None:
    """Create a cache for `length` tokens; None for a model that has other states than keys and values."""
    cache = DecodingCache(model, length, dtype)
    return cache if all(isinstance(layer, GrowingLayer) for layer in cache.layers) else None


def cache_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of keys and values: that of the checkpoint if the activations are wider.

    Attention other than torch's would cast all keys and values in each step; they then have the dtype of the model.
    """
    fused = getattr(text_config(model.config), "_attn_implementation", None) == "sdpa"
    return torch.bfloat16 if fused and widened_from(model) is torch.bfloat16 else model.dtype
