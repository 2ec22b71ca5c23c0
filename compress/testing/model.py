"""A small model with random weights, built in code, on which passes are tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

VOCABULARY = 64
SEQUENCES, LENGTH = 6, 32
HIDDEN, INSIDE = 64, 128  # widths that the default group size of 64 columns divides
SPREAD = 0.2  # of the weights; the default of transformers, 0.02, would leave the hidden states nearly unchanged


EXPERTS, PER_TOKEN = 4, 2
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INSIDE,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    "initializer_range": SPREAD,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def tiny_model() -> PreTrainedModel:
    """Build a decoder of three blocks with grouped-query attention and fixed weights; the global random state stays."""
    return _built(LlamaForCausalLM, LlamaConfig(**SIZES))


def tiny_mixture() -> PreTrainedModel:
    """Build the same with four experts in each block, two of which compute a token."""
    return _built(MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=PER_TOKEN))


def _built(kind: Callable[[Any], PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config).eval().requires_grad_(False)


def tiny_ids() -> Tensor:
    """Return calibration ids for the model, [sequences, length]."""
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
