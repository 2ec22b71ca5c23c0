"""The size of a cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from compress.models.kinds.contract import text_config


def cache_bytes(model: PreTrainedModel, batch: int, length: int, dtype: torch.dtype) -> float:
    """Estimate the size in bytes of a cache of keys and values, with the shapes of the first layer for all layers.

    Returns:
        Infinity for a model whose config has no number of heads.
    """
    config: Any = text_config(model.config)
    count = getattr(config, "num_attention_heads", None)
    if not isinstance(count, int):
        return float("inf")
    heads = getattr(config, "num_key_value_heads", None) or count
    width = getattr(config, "head_dim", None) or config.hidden_size // count
    return 2 * config.num_hidden_layers * batch * heads * width * length * dtype.itemsize
