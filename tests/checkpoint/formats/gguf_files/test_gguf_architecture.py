"""Architectures of GGUF files: what llama.cpp computes otherwise is refused."""

import gguf
import pytest
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig

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
