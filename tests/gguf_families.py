"""Random models of the architectures that GGUF files are written for, with the vocabulary of the pico model."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}
GPT2 = {
    "vocab_size": 1024,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 1024,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FALCON = {k: v for k, v in SIZES.items() if k != "intermediate_size"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
SINKS = {
    **GROUPED,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 32,
    },
}
GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**GROUPED, "head_dim": 32}),
    "llama-biases": ("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("llama", {**GROUPED, "rope_parameters": LLAMA3}),
    "llama-linear-rope": (
        "llama",
        {**GROUPED, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}},
    ),
    "mistral": ("mistral", {**GROUPED, "sliding_window": None}),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", GROUPED),
    "qwen2-tied": ("qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2-moe": ("qwen2_moe", {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 32}),
    "qwen3-moe": (
        "qwen3_moe",  # transformers reads no other width of experts from GGUF
        {**GROUPED, **EXPERTS, "moe_intermediate_size": 768, "head_dim": 32, "norm_topk_prob": True},
    ),
    "gemma": ("gemma", {**GROUPED, "head_dim": 16}),
    "gemma2": ("gemma2", {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}),
    "gemma3": (
        "gemma3_text",
        {**GROUPED, "num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16},
    ),
    "phi": ("phi", {**SIZES, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {**GROUPED, "sliding_window": None}),
    "phi3-longrope": (
        "phi3",
        {
            **GROUPED,
            "rope_parameters": LONG,
            "original_max_position_embeddings": 512,
            "max_position_embeddings": 1024,
            "sliding_window": None,
        },
    ),
    "starcoder2": ("starcoder2", {**GROUPED, "sliding_window": None}),
    "gpt2": ("gpt2", GPT2),
    "gpt-neox": ("gpt_neox", {**SIZES, "use_parallel_residual": False}),
    "gpt-neox-parallel": ("gpt_neox", {**SIZES, "rotary_pct": 0.5, "use_parallel_residual": True}),
    "falcon": ("falcon", {**FALCON, "multi_query": True, "num_kv_heads": 1}),
    "falcon-grouped": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "olmo2": ("olmo2", GROUPED),
    "olmoe": ("olmoe", {**SIZES, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2}),
    "glm4": ("glm4", {**GROUPED, "head_dim": 16, "attention_bias": True}),
    "granite": ("granite", {**GROUPED, **GRANITE}),
    "cohere": ("cohere", {**GROUPED, "logit_scale": 0.25}),
    "stablelm": ("stablelm", {**GROUPED, "use_parallel_residual": False, "use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {**GROUPED, "use_parallel_residual": True}),
    "nemotron": ("nemotron", GROUPED),
    "arcee": ("arcee", GROUPED),
    "smollm3": ("smollm3", {**GROUPED, "num_hidden_layers": 4, "use_sliding_window": False, "sliding_window": None}),
    "seed-oss": ("seed_oss", {**GROUPED, "head_dim": 16}),
    "bloom": ("bloom", {"vocab_size": 1024, "hidden_size": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0}),
    "deepseek-v2": ("deepseek_v2", {**SIZES, **LATENT, "rope_parameters": YARN}),
    "deepseek-v2-lite": ("deepseek_v2", {**SIZES, **LATENT, "q_lora_rank": None, "num_hidden_layers": 26}),
    "deepseek-v3": ("deepseek_v3", {**SIZES, **LATENT, "n_group": 2, "topk_group": 1, "rope_parameters": YARN}),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        {**SIZES, **LATENT, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "gpt-oss": ("gpt_oss", SINKS),
    "lfm2": (
        "lfm2",
        {
            **GROUPED,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
        },
    ),
}
"""The model type and the configuration of a family by name."""
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {"bert": ("bert", SIZES)}
"""The same of models that make embeddings of texts."""
TEXT = "The red fox, a naïve one, ran: 12 times."
"""A text of which an encoder makes an embedding."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def gguf_model(family: str, **changes: Any) -> PreTrainedModel:
    """Return a random model of a family in which no weight is 0 or 1. changes: of entries of its configuration."""
    kind, options = (FAMILIES | ENCODERS)[family]
    changes = {key: value for key, value in changes.items() if key in options}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**options, **changes})
    auto: Any = AutoModel if family in ENCODERS else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    return model


def word_pieces(lowercase: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer as that of BERT, with letters, digits, marks and a few longer pieces."""
    letters = [chr(code) for code in range(33, 127)]
    pieces = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters), "the", "fox", "##ed", "##aive", "times"]
    built = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(token, pieces.index(token)) for token in ("[CLS]", "[SEP]")]
    built.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=built, **dict(zip(names, SPECIAL, strict=True)))
