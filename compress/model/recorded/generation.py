"""`generate` of transformers with recorded decoding: a cache of a fixed length where that fits, and its steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from compress.kernels import dispatch
from compress.model.objective import text_config
from compress.model.open.computation import widened_from
from compress.model.recorded.arguments import StepArguments
from compress.model.recorded.decoding import RecordedDecoding

LENGTHS = 128
"""Lengths of caches are multiples of this, so that texts of other lengths need no other step."""
LARGEST_CACHE = 1 << 30
"""Bytes of a cache that is made for the longest text that a call may generate; a larger one grows with the text."""
MODES = "greedy_search", "sample"
"""What `generate` may do; beams and drafts move caches in ways of their own."""
HOOKS = (
    "_prepare_cache_for_generation", "_valid_auto_compile_criteria", "get_compiled_call",
    "prepare_inputs_for_generation",
)  # fmt: skip
"""The methods of transformers that make the cache of a call, the forward pass of its steps, and their arguments."""
NAMES = "generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length"


class StoredLayer(StaticLayer):
    """Keys and values of a fixed length that are kept in a dtype of their own, and given in that of the model.

    stored: None: in that of the model.
    """

    stored: torch.dtype | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values, and return all."""
        new, stored = (key_states, value_states), self.stored or key_states.dtype
        keys, values = super().update(*[one.to(stored) for one in new], *args, **kwargs)
        return keys.to(key_states.dtype), values.to(value_states.dtype)


class DecodingWindow(StoredLayer, StaticSlidingWindowLayer):
    """Keys and values of a sliding window."""


class DecodingLayer(StoredLayer):
    """Keys and values of a fixed length, of which the prompt sees its own alone."""

    def __init__(self, max_cache_len: int) -> None:
        super().__init__(max_cache_len)
        self.prompted = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys, and the first one: those of the prompt, later all."""
        return super().get_mask_sizes(query_length) if self.prompted else (query_length, 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values. The prompt gets its own back: empty places behind them would only take time."""
        found = super().update(key_states, value_states, *args, **kwargs)
        if self.prompted:
            return found
        self.prompted = True
        return key_states, value_states

    def reset(self) -> None:
        """Forget all keys."""
        super().reset()
        self.prompted = False


class DecodingCache(StaticCache):
    """A cache whose steps are recorded. dtype: of keys and values."""

    def __init__(self, model: PreTrainedModel, max_cache_len: int, dtype: torch.dtype) -> None:
        super().__init__(config=text_config(model.config), max_cache_len=max_cache_len)
        layers: list[Any] = list(self.layers)
        if getattr(model, "_supports_attention_backend", False):  # others may make masks of a length of their own
            layers = [DecodingLayer(max_cache_len) if type(layer) is StaticLayer else layer for layer in layers]
        for i, layer in enumerate(layers):
            if type(layer) is StaticSlidingWindowLayer:
                layers[i] = DecodingWindow(layer.max_cache_len, layer.max_cache_len)
            if isinstance(layers[i], StoredLayer):
                layers[i].stored = dtype
        self.layers: Any = layers


class RecordedGeneration:
    """The recorded decoding of a model's `generate`.

    A call that brings a cache, names one, searches with beams or drafts, or whose cache would be larger than
    `LARGEST_CACHE`, is that of transformers. So is a call in plain torch (`dispatch.plain_torch`).
    """

    def __init__(self, model: PreTrainedModel, otherwise: Callable[..., Any] | None = None) -> None:
        """otherwise: computes steps that are not recorded; None: the model."""
        self.model = model
        self.decoding = RecordedDecoding(model, otherwise)
        self.arguments = StepArguments(model)

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
        # Steps that cannot be recorded would convert all keys and values each time.
        dtype = cache_dtype(self.model) if self.decoding.reason is None else self.model.dtype
        if self.fits(config, given, mode) and cache_bytes(self.model, batch, length, dtype) <= LARGEST_CACHE:
            cache = fixed_cache(self.model, -(-length // LENGTHS) * LENGTHS, dtype)
            if cache is not None:
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
        if isinstance(kwargs.get("past_key_values"), DecodingCache):
            return self.arguments(input_ids, given)
        return self.arguments.plainly(input_ids, given)


def fixed_cache(model: PreTrainedModel, length: int, dtype: torch.dtype) -> DecodingCache | None:
    """A cache for so many tokens; None for a model that keeps other states than keys and values."""
    cache = DecodingCache(model, length, dtype)
    return cache if all(isinstance(layer, StaticLayer) for layer in cache.layers) else None


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
