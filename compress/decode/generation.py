"""`generate` of transformers with recorded decoding: a cache of a fixed length where that fits, and its steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.decode.arguments import StepArguments
from compress.decode.caches import LENGTHS as LENGTHS
from compress.decode.caches import DecodingCache, DecodingWindow, StoredLayer
from compress.decode.decoding import RecordedDecoding
from compress.kernels import dispatch
from compress.models.computation import widened_from
from compress.models.kinds.objective import text_config

LARGEST_CACHE = 1 << 30
"""Bytes of a cache that is made for the longest text that a call may generate; a larger one grows with the text."""
MODES = "greedy_search", "sample"
"""What `generate` may do with recorded steps; beams, and the model that checks a draft, take steps of another form."""
HOOKS = (
    "_prepare_cache_for_generation",
    "_valid_auto_compile_criteria",
    "get_compiled_call",
    "prepare_inputs_for_generation",
)
"""The methods of transformers that make the cache of a call, the forward pass of its steps, and their arguments."""
NAMES = "generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length"


class RecordedGeneration:
    """The recorded decoding of a model's `generate`.

    A call that brings another cache, names one, searches with beams, checks a draft, or whose cache would be larger
    than `LARGEST_CACHE`, is that of transformers. So is a call in plain torch (`dispatch.plain_torch`), and a draft by
    a model with sliding windows.
    """

    def __init__(self, model: PreTrainedModel, otherwise: Callable[..., Any] | None = None) -> None:
        """otherwise: computes steps that are not recorded; None: the model."""
        self.model = model
        self.decoding = RecordedDecoding(model, otherwise)
        self.arguments = StepArguments(model)
        self.ends: list[Any] = []

    def install(self) -> bool:
        """Let `model.generate` decode so; returns whether this version of transformers can."""
        kind: Any = type(self.model)
        prepare = getattr(kind, HOOKS[0], None)
        if prepare is None or not all(hasattr(kind, name) for name in HOOKS):
            return False
        if tuple(inspect.signature(prepare).parameters)[1:] != NAMES:
            return False
        own = self.prepare_cache, self.is_recorded, self.call_of, self.arguments_of
        vars(self.model).update(zip(HOOKS, own, strict=True))
        return True

    def prepare_cache(self, config: Any, given: dict[str, Any], mode: Any, batch: int, length: int) -> None:
        """Make the cache of a call; given: the arguments of the model, which get it."""
        ends = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        if len(self.ends) != len(ends) or any(a is not b for a, b in zip(ends, self.ends, strict=True)):
            self.decoding.forget()  # embedding and head can be replaced, as by `resize_token_embeddings`
            self.ends = ends
        # Steps that cannot be recorded would convert all keys and values each time.
        dtype = cache_dtype(self.model) if self.decoding.reason is None else self.model.dtype
        if self.fits(config, given, mode) and cache_bytes(self.model, batch, length, dtype) <= LARGEST_CACHE:
            cache = fixed_cache(self.model, -(-length // LENGTHS) * LENGTHS, dtype)
            # Drafts are cropped, which a full window allows only where it keeps older tokens, too.
            windows = cache is not None and any(isinstance(layer, DecodingWindow) for layer in cache.layers)
            if cache is not None and not (windows and getattr(config, "is_assistant", False)):
                given["past_key_values"] = cache
                return
        getattr(type(self.model), HOOKS[0])(self.model, config, given, mode, batch, length)

    def fits(self, config: Any, given: dict[str, Any], mode: Any) -> bool:
        """Whether a call decodes by recorded steps."""
        model: Any = self.model
        if given.get("past_key_values") is not None or config.use_cache is False or dispatch.in_plain_torch():
            return False
        if config.cache_implementation is not None or mode not in MODES or model.config.is_encoder_decoder:
            return False
        on_cpu = next(model.parameters()).device.type == "cpu" and not torch.is_grad_enabled()
        return on_cpu and model._supports_default_dynamic_cache()

    def is_recorded(self, given: dict[str, Any], config: Any) -> bool:
        """Whether the steps of a call are those of `call_of`."""
        if isinstance(given.get("past_key_values"), DecodingCache):
            return True
        return bool(getattr(type(self.model), HOOKS[1])(self.model, given, config))

    def call_of(self, config: Any) -> Callable[..., Any]:
        """The forward pass of decoding steps."""
        return self.decoding

    def arguments_of(self, input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
        """The arguments of a forward pass. transformers reads the names of the parameters."""
        given = kwargs if inputs_embeds is None else {**kwargs, "inputs_embeds": inputs_embeds}
        cache = kwargs.get("past_key_values")
        if isinstance(cache, DecodingCache):
            cache.reserve(kwargs.get("next_sequence_length") or 0)
            return self.arguments(input_ids, given)
        return self.arguments.plainly(input_ids, given)


def fixed_cache(model: PreTrainedModel, length: int, dtype: torch.dtype) -> DecodingCache | None:
    """A cache for so many tokens; None for a model that keeps other states than keys and values."""
    cache = DecodingCache(model, length, dtype)
    return cache if all(isinstance(layer, StoredLayer) for layer in cache.layers) else None


def cache_bytes(model: PreTrainedModel, batch: int, length: int, dtype: torch.dtype) -> float:
    """Bytes of a cache of keys and values, about: as if all layers had those of the first; infinite if not known."""
    config: Any = text_config(model.config)
    count = getattr(config, "num_attention_heads", None)
    if not isinstance(count, int):
        return float("inf")
    heads = getattr(config, "num_key_value_heads", None) or count
    width = getattr(config, "head_dim", None) or config.hidden_size // count
    return 2 * config.num_hidden_layers * batch * heads * width * length * dtype.itemsize


def cache_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of keys and values: that of the checkpoint where its activations are wider.

    Attention by other code than torch's would convert all of them in each step, so they then have that of the model.
    """
    fused = getattr(text_config(model.config), "_attn_implementation", None) == "sdpa"
    return torch.bfloat16 if fused and widened_from(model) is torch.bfloat16 else model.dtype
