"""Architectures of GGUF files: what llama.cpp computes otherwise is refused."""

import gguf
import pytest
from transformers import (
    FalconConfig,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from compress.checkpoint.formats.gguf_files.architecture import architecture_of, architectures


def test_every_architecture_is_one_of_the_gguf_package():
    known = set(gguf.MODEL_ARCH_NAMES.values())
    assert {found.name for found in architectures().values()} <= known


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(hidden_act="gelu"), "its activation is gelu, but llama.cpp computes silu"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "of the type 'dynamic'",
        ),
        (Gemma3TextConfig(head_dim=64, query_pre_attn_scalar=128), "queries are scaled by 128, .* head size 64"),
        (
            Gemma3TextConfig(head_dim=64, query_pre_attn_scalar=64, layer_types=["full_attention"] * 26),
            "its sliding windows are not in 5 of 6 blocks",
        ),
        (Qwen2MoeConfig(norm_topk_prob=True), "norm_topk_prob is True, but llama.cpp computes qwen2moe with .* False"),
        (Qwen3MoeConfig(norm_topk_prob=False), "norm_topk_prob is False, but llama.cpp computes qwen3moe with .* True"),
        (Qwen3MoeConfig(norm_topk_prob=True, mlp_only_layers=[0]), r"mlp_only_layers is \[0\], but llama.cpp"),
        (FalconConfig(alibi=True), "alibi is True"),
        (Olmo2Config(tie_word_embeddings=True), "tie_word_embeddings is True, but llama.cpp computes olmo2 with"),
        (Starcoder2Config(use_bias=False), "use_bias is False"),
        (Phi3Config(head_dim=64, pad_token_id=0), "its attention heads are 2048 wide together, .* as the model, 3072"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(config, message):
    found = architecture_of(config).refuses(config)
    assert found is not None
    with pytest.raises(ValueError, match=message):
        raise ValueError(found)


def test_a_window_bounds_the_context():
    config = MistralConfig(sliding_window=1024, max_position_embeddings=4096)
    found = architecture_of(config)
    assert found.refuses(config) is None
    assert dict(found.metadata(config))["context_length"] == 1024


def test_the_hyperparameters_of_experts_parts_of_heads_and_scales():
    config = MixtralConfig(num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    stated = dict(architecture_of(config).metadata(config))
    assert (stated["expert_count"], stated["expert_used_count"]) == (8, 2)
    config = GPTNeoXConfig(hidden_size=64, num_attention_heads=4, rotary_pct=0.25, layer_norm_eps=1e-3)
    stated = dict(architecture_of(config).metadata(config))
    assert stated["rope.dimension_count"] == 4 and stated["use_parallel_residual"] is True
    assert stated["attention.layer_norm_epsilon"] == 1e-3 and "attention.layer_norm_rms_epsilon" not in stated
    config = GraniteConfig(attention_multiplier=0.5, logits_scaling=8.0)
    stated = dict(architecture_of(config).metadata(config))
    assert (stated["attention.scale"], stated["logit_scale"]) == (0.5, 8.0)
