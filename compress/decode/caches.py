"""The cache of recorded decoding: a `StaticCache` that also does what transformers asks of a cache that grows.

transformers' `StaticLayer` cannot be cropped, repeated or grown, and its length is a tensor. A cache of recorded
decoding takes the place of transformers' default cache, the `DynamicCache`, so it has all of its operations. They
replace or change the tensors of the layers; a recorded step is then bound to the new ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from compress.kernels.recording import as_operators
from compress.models.kinds.contract import text_config

LENGTHS = 128
"""Lengths of caches are multiples of this, so that texts of other lengths need no other step."""
GROWTH = 1.5
"""Least factor by which a full cache grows, because a step is recorded anew for each length of the cache."""
UNLIMITED = 1 << 40
"""A length that cuts no sliding window of a model."""


class GrowingLayer(StaticLayer):
    """Keys and values of a fixed length that grows when it is full.

    stored: the dtype in which they are kept; they are returned in that of the model. None: in that of the model. edits:
    how often something else than a new token has changed the layer.
    """

    stored: torch.dtype | None = None
    is_croppable = True
    edits = 0

    @property
    def longest(self) -> int | None:
        """The number of tokens to which the layer may grow; None: any."""
        return None

    @property
    def length(self) -> int:
        """The number of tokens that the layer has seen."""
        return int(self.cumulative_length) if self.is_initialized else 0

    def get_seq_length(self) -> Any:
        """The number of tokens: a tensor while a step is recorded or compiled, which then holds for later steps too."""
        return super().get_seq_length() if as_operators() else self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys, and the position of the first one."""
        self.reserve(query_length)
        return super().get_mask_sizes(query_length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate keys and values in the dtype in which they are kept."""
        stored = self.stored or key_states.dtype
        super().lazy_initialization(key_states.to(stored), value_states.to(stored))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values, and return all."""
        self.reserve(key_states.shape[-2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = [states.to(self.keys.dtype) for states in (key_states, value_states)]  # type: ignore[union-attr]
        keys, values = super().update(*new, *args, **kwargs)
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    def reserve(self, count: int) -> None:
        """Let the layer have space for so many more tokens; a recorded or compiled step cannot do so itself."""
        if as_operators():
            return
        needed, limit = self.length + count, self.longest
        if needed > self.max_cache_len and (limit is None or self.max_cache_len < limit):
            wanted = max(needed, int(self.max_cache_len * GROWTH))
            wanted = -(-wanted // LENGTHS) * LENGTHS
            self._resize(wanted if limit is None else min(wanted, limit))
        elif self.cumulative_length.is_inference() and not torch.is_inference_mode_enabled():
            self._resize(self.max_cache_len)  # tensors of inference mode cannot be changed outside of it

    def _resize(self, size: int) -> None:
        """Allocate tensors for another number of tokens, with the present ones."""
        self.max_cache_len = size
        self.cumulative_length = self.cumulative_length.clone()
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros((*old.shape[:2], size, old.shape[-1]))
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def reset(self) -> None:
        """Forget all tokens."""
        self.reserve(0)
        super().reset()
        self.edits += 1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i be row beam_idx[i], as beam search does."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row so many times."""
        if self.is_initialized:
            rows = torch.arange(self.batch_size, device=self.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = self.keys[indices.to(self.device)], self.values[indices.to(self.device)]
            self.batch_size = self.keys.shape[0]
            self.edits += 1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; the number is negative, as for transformers' `DynamicLayer.crop`."""
        present = DynamicLayer()
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            length = self.length
            present.lazy_initialization(self.keys, self.values)
            present.keys, present.values = self.keys[:, :, :length], self.values[:, :, :length]
        present.crop(tokens_to_remove)  # decides what the number means, and what is an error
        if self.is_initialized:
            self._shorten(present.get_seq_length())

    def _shorten(self, length: int) -> None:
        """Set the number of tokens to a smaller one. The memory of later tokens is hidden by masks."""
        self.reserve(0)
        self.cumulative_length.fill_(length)
        self.edits += 1


class DecodingWindow(GrowingLayer, StaticSlidingWindowLayer):
    """Keys and values of a sliding window, which grow up to the window of the model where the text is shorter."""

    def __init__(self, max_cache_len: int, sliding_window: int) -> None:
        super().__init__(max_cache_len, sliding_window)
        self.sliding_window = sliding_window

    @property
    def longest(self) -> int:
        """The number of tokens in the window."""
        return self.sliding_window

    @property
    def length(self) -> int:
        """The number of tokens that the layer has seen."""
        return self.cumulative_length_int

    def get_seq_length(self) -> int:
        """The number of tokens."""
        return self.cumulative_length_int

    def get_max_length(self) -> int:
        """The number of tokens in the window."""
        return self.sliding_window

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. A full window has lost the tokens before it: that is a RuntimeError."""
        if self.length >= self.sliding_window:
            window = DynamicSlidingWindowLayer(self.sliding_window)
            window.cumulative_length = self.length
            window.crop(tokens_to_remove)  # raises the error of transformers
        else:
            super().crop(tokens_to_remove)

    def _shorten(self, length: int) -> None:
        super()._shorten(length)
        self.cumulative_length_int = length

    def recording_past(self) -> DynamicSlidingWindowLayer:
        """The layer as one of transformers that keeps the tokens outside of its window until it is cropped."""
        layer = DynamicSlidingWindowLayer(self.sliding_window)
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            layer.lazy_initialization(self.keys, self.values)
            seen, cached = min(self.length, self.max_cache_len), min(self.length, self.sliding_window - 1)
            layer.keys, layer.values = (states[:, :, seen - cached : seen] for states in (self.keys, self.values))
            layer.cumulative_length = self.length
        layer.activate_past_recording()
        return layer


class DecodingLayer(GrowingLayer):
    """Keys and values of which the prompt sees its own alone."""

    def __init__(self, max_cache_len: int) -> None:
        super().__init__(max_cache_len)
        self.prompted = False

    def get_max_length(self) -> int:
        """No maximum: the layer grows."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys, and the first one: those of the prompt, later all."""
        return super().get_mask_sizes(query_length) if self.prompted else (query_length, 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values. The prompt gets its own back: empty places after them would only take time."""
        states = super().update(key_states, value_states, *args, **kwargs)
        if self.prompted:
            return states
        self.prompted = True
        return key_states, value_states

    def reset(self) -> None:
        """Forget all keys."""
        super().reset()
        self.prompted = False

    def _shorten(self, length: int) -> None:
        super()._shorten(length)
        self.prompted = length > 0


class DecodingCache(StaticCache):
    """A cache whose steps are recorded. dtype: of keys and values."""

    def __init__(self, model: PreTrainedModel, max_cache_len: int, dtype: torch.dtype) -> None:
        super().__init__(config=text_config(model.config), max_cache_len=UNLIMITED)  # nothing is allocated yet
        # Others may make masks of a length of their own.
        whole = DecodingLayer if getattr(model, "_supports_attention_backend", False) else GrowingLayer
        layers: list[Any] = list(self.layers)
        for i, layer in enumerate(layers):
            if type(layer) is StaticLayer:
                layers[i] = whole(max_cache_len)
            elif type(layer) is StaticSlidingWindowLayer:
                layers[i] = DecodingWindow(max_cache_len, layer.max_cache_len)
            if isinstance(layers[i], GrowingLayer):
                layers[i].stored = dtype
        self.layers: Any = layers

    @property
    def edits(self) -> int:
        """How often something else than a new token has changed the cache."""
        return self.layers[0].edits if isinstance(self.layers[0], GrowingLayer) else 0

    def reserve(self, count: int) -> None:
        """Let the cache have space for so many more tokens, before a step that is recorded."""
        for layer in self.layers:
            if isinstance(layer, GrowingLayer):
                layer.reserve(count)

    def activate_past_recording(self) -> None:
        """Let the cache be cropped beyond a sliding window. Steps of such a model are then no longer recorded."""
        self.layers = [layer.recording_past() if isinstance(layer, DecodingWindow) else layer for layer in self.layers]
        super().activate_past_recording()
