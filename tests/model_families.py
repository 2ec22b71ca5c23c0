"""Tiny random models of many families, chosen by structure: norms, attention, experts, mixers, ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

VOCAB, WIDTH = 64, 32
usual = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
grouped = {**usual, "num_key_value_heads": 2}
opt = {**{k: v for k, v in usual.items() if k != "intermediate_size"}, "ffn_dim": 48, "word_embed_proj_dim": WIDTH}
short = {key: value for key, value in usual.items() if key in ("vocab_size", "hidden_size", "eos_token_id")}
gpt = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
heads8 = {"head_dim": 8}
window = {"sliding_window": 4}
mamba = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "state_size": 8,
    "conv_kernel": 4,
    "expand": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
mamba_mixer = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
linear_attention = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
latent = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "moe_intermediate_size": 16,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

paired = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
t5 = {**paired, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 3}
bart = {
    **paired,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "forced_eos_token_id": None,
}
whisper = {
    **{key: value for key, value in bart.items() if key != "max_position_embeddings"},
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 32,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**grouped, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", grouped),
    "qwen3": ("qwen3", {**grouped, **heads8}),
    "gpt2": ("gpt2", gpt),
    "opt": ("opt", opt),
    "opt-post-norm": ("opt", {**opt, "do_layer_norm_before": False}),
    "gpt-neox": ("gpt_neox", {**usual, "use_parallel_residual": False}),
    "gpt-neox-parallel": ("gpt_neox", {**usual, "use_parallel_residual": True}),
    "gemma2": ("gemma2", {**grouped, **heads8, **window}),
    "gemma3": ("gemma3_text", {**grouped, **heads8, **window, "query_pre_attn_scalar": 8}),
    "phi3": ("phi3", grouped),
    "bloom": ("bloom", {**short, "n_layer": 3, "n_head": 4}),
    "falcon": ("falcon", {**short, "num_hidden_layers": 3, "num_attention_heads": 4}),  # parallel, multi-query
    "mixtral": ("mixtral", {**grouped, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", {**grouped, **heads8, **experts, "norm_topk_prob": True}),
    "bert": ("bert", usual),
    "phi": ("phi", usual),
    "starcoder2": ("starcoder2", {**grouped, "use_bias": True}),
    "cohere": ("cohere", grouped),
    "olmo2": ("olmo2", grouped),
    "glm4": ("glm4", {**grouped, **heads8}),
    "deepseek-v3": ("deepseek_v3", {**grouped, **latent}),
    "gpt-oss": ("gpt_oss", {**grouped, **heads8, **window, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "llama4_text",
        {
            **grouped,
            **heads8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 16,
        },
    ),
    "mamba": ("mamba", {**mamba, "time_step_rank": 4}),
    "mamba2": ("mamba2", {**mamba, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
    "rwkv": ("rwkv", {**short, "attention_hidden_size": WIDTH, "num_hidden_layers": 3, "context_length": 64}),
    "jamba": (
        "jamba",
        {
            **grouped,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": ("bamba", {**grouped, **mamba_mixer, "attn_layer_indices": [1]}),
    "qwen3-next": (
        "qwen3_next",
        {**grouped, **heads8, **experts, **linear_attention, "shared_expert_intermediate_size": 16},
    ),
    "lfm2": (
        "lfm2",
        {
            **grouped,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
        },
    ),
    "modernbert": ("modernbert", {**usual, "local_attention": 8, "cls_token_id": 0, "sep_token_id": 1}),
    "albert": ("albert", {**usual, "embedding_size": 16}),
    "t5": ("t5", t5),
    "t5-gated": ("t5", {**t5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("bart", bart),
    "mbart": ("mbart", bart),
    "pegasus": ("pegasus", bart),
    "marian": ("marian", bart),
    "whisper": ("whisper", whisper),
}
"""The model type and the configuration of a family by name. New ones come from transformers, not from this table."""

ENCODERS = {"bert", "modernbert", "albert"}
PAIRS = {"t5", "t5-gated", "bart", "mbart", "pegasus", "marian"}
"""Those with an encoder and a decoder, of 2 and 3 blocks."""
RECORDED = {"whisper"}
"""The same, with an encoder of recordings: of 8 bins and 24 frames each."""

STRUCTURES = {
    "llama": "RMSNorm, grouped-query attention, gated feed-forward, untied head",
    "gpt2": "LayerNorm with biases, transposed linears, fused q/k/v, learned positions, tied head",
    "opt": "LayerNorm with biases, ReLU, learned positions with an offset, tied head",
    "gpt-neox-parallel": "attention and feed-forward in parallel, each with a norm, fused q/k/v by heads",
    "phi": "attention and feed-forward in parallel on one norm, biases, partial rotary positions",
    "gemma3": "norms (1 + weight) around each part and on queries and keys, sliding windows, tied head",
    "phi3": "fused q/k/v and fused gate and up",
    "starcoder2": "LayerNorm and linears with biases, grouped-query attention, sliding window",
    "olmo2": "norms after attention and feed-forward, and on whole queries and keys",
    "glm4": "norms before and after each part, fused gate and up, partial rotary positions",
    "falcon": "multi-query attention, fused q/k/v, parallel",
    "cohere": "parallel, LayerNorm without biases, scaled logits, tied head",
    "qwen3-moe": "experts in one tensor, a router",
    "deepseek-v3": "low-rank queries, keys and values, shared experts, a first block without experts",
    "gpt-oss": "experts in transposed tensors with biases, attention sinks",
    "llama4": "experts in transposed tensors, a shared expert, chunked attention",
    "mamba": "selective state space, no attention",
    "mamba2": "selective state space by heads, one fused input projection",
    "jamba": "blocks of attention, of state spaces and of experts in turns",
    "bamba": "blocks of attention and of state spaces by heads in turns",
    "qwen3-next": "linear and gated full attention in turns, experts and a gated shared expert",
    "lfm2": "gated short convolutions and attention in turns",
    "bert": "encoder, norms after each part, learned positions, head of masked tokens",
    "modernbert": "encoder without biases, fused q/k/v, local and global attention, gated feed-forward",
    "rwkv": "linear attention with time mixing, no softmax",
    "albert": "encoder that runs one block several times",
    "t5": "encoder and decoder, RMSNorm, position biases from the first block, ReLU, one table for three modules",
    "t5-gated": "the same with a gated feed-forward and logits that are not scaled (T5 v1.1)",
    "bart": "encoder and decoder, LayerNorm after each part, biases, learned positions, GELU",
    "pegasus": "encoder and decoder, LayerNorm before each part, biases, fixed positions, ReLU",
    "whisper": "encoder of recordings after two convolutions, and decoder; LayerNorm before each part, biases but on keys",
}
"""The families of the matrix, and what is special about each."""


def config_of(family: str, **changes: Any) -> Any:
    """The configuration of a family."""
    kind, options = FAMILIES[family]
    config = AutoConfig.for_model(kind, **options)
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model in which no weight is 0 or 1. changes: of its configuration."""
    config = config_of(family, **changes)
    torch.manual_seed(seed)
    kind: Any = AutoModelForMaskedLM if family in ENCODERS else AutoModelForCausalLM
    kind = AutoModelForSeq2SeqLM if family in PAIRS else AutoModelForSpeechSeq2Seq if family in RECORDED else kind
    auto: Callable[..., PreTrainedModel] = kind.from_config
    model = auto(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    return model
