"""What transformers makes of the header of a GGUF file: it drops keys and tensors that its reader does not know."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from compress.checkpoint.containers.gguf import write_gguf
from compress.checkpoint.containers.gguf_header import FILE
from compress.checkpoint.formats.gguf_files.architecture import (
    WINDOW,
    Architecture,
    feed_forward_width,
    head_dim,
    key_value_heads,
    rope_of,
)
from compress.errors import CannotRun, call_foreign
from compress.models.quiet import quiet_transformers

COMPUTED = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "hidden_act",
    "hidden_activation",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_epsilon",
    "norm_eps",
    "conv_L_cache",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "use_bias",
    "use_parallel_residual",
    "new_decoder_architecture",
    "partial_rotary_factor",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "layer_types",
)
"""Keys of configurations on which the outputs depend."""
SIZES: Mapping[str, Callable[[PretrainedConfig], int]] = {
    "head_dim": head_dim,
    "num_key_value_heads": key_value_heads,
    "intermediate_size": feed_forward_width,
    "n_positions": lambda config: getattr(config, "n_positions", 0),
}
"""Sizes that configurations state in several ways."""


def misread(architecture: Architecture, config: PretrainedConfig) -> str | None:
    """Return why the model that transformers makes of a file computes another function; None if nothing is known.

    A file without tensors is written, and read back by the installed version of transformers.

    Args:
        architecture: architecture of the model in the file.
        config: configuration of the model.
    """
    with TemporaryDirectory() as folder:
        header = [(f"{architecture.name}.{key}", value) for key, value in architecture.metadata(config)]
        write_gguf(Path(folder) / FILE, architecture.name, header, [])
        try:
            with quiet_transformers():
                read = call_foreign(AutoConfig.from_pretrained, folder, gguf_file=FILE)
        except CannotRun as error:
            return f"transformers does not read a {architecture.name} file: {error.cause}"
    pairs = {key: (getattr(config, key, None), getattr(read, key, None)) for key in COMPUTED}
    for name, size in SIZES.items():
        pairs[name] = size(config), size(read)
    if WINDOW in (getattr(config, "layer_types", None) or ()):
        pairs["sliding_window"] = config.sliding_window, getattr(read, "sliding_window", None)
    different = next((key for key, pair in pairs.items() if not _equal(*pair)), None)
    if different is None:
        return None
    value = pairs[different][0]
    value = f"of type {rope_of(config).get('rope_type')}" if isinstance(value, Mapping) else value
    return f"transformers does not read {different} {value} from a {architecture.name} file"


def _equal(value: Any, read: Any) -> bool:
    """Whether values are equal but for the rounding to float32 in a file; False and None are equal."""
    if isinstance(value, Mapping) and isinstance(read, Mapping):
        return all(_equal(value.get(key), read.get(key)) for key in {*value, *read})
    if isinstance(value, float) and isinstance(read, float | int):
        return math.isclose(value, read, rel_tol=1e-6)
    return value == read or not (value or read)
