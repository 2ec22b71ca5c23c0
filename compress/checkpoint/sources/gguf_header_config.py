"""The configuration of a GGUF file of another program whose header transformers cannot read.

`Architecture.metadata` states the keys of a configuration; here they are read backwards. The configuration is then
stated again: a key of the header that it does not state, or states with another value, is an error, as it is for the
files that transformers reads (`gguf_contents.check_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from compress.checkpoint.formats.gguf_files.architecture import (
    KEYS,
    Architecture,
    architectures,
    rope_of,
    yarn_mscale,
)
from compress.checkpoint.sources.gguf_contents import WITHOUT_EFFECT, GGUFHeader, is_same, refuse_names
from compress.checkpoint.sources.untrusted import check_config
from compress.errors import CannotRun, ModelError, call_foreign

SIZES: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}
"""Whole numbers of the header by their names in the configuration."""
YARN = "rope.scaling.yarn"
BETAS: Mapping[str, tuple[str, float]] = {
    f"{YARN}_beta_fast": ("beta_fast", 32.0),
    f"{YARN}_beta_slow": ("beta_slow", 1.0),
}
"""Keys of YaRN's ramp, their names in the configuration, and the values of llama.cpp where a file states none."""
OPTIONAL = frozenset({"vocab_size", "rope.dimension_count", "attention.value_length", *BETAS})
"""Keys without which llama.cpp computes what the configuration states: lengths that others repeat, and `BETAS`."""
HARMLESS = frozenset(key for key in WITHOUT_EFFECT if not key.startswith(YARN))
TOKENS = ("bos", "eos", "padding")


def kind_of_header(name: str) -> str | None:
    """Return the type in config.json of an architecture whose headers transformers cannot read; None for others."""
    return next((kind for kind, a in architectures().items() if a.reads_header and a.name == name), None)


def config_of_header(header: GGUFHeader) -> PretrainedConfig | None:
    """Return the configuration that the keys of a file state, if transformers cannot read them; None for other files.

    What the keys do not state is as in the configuration class, such as `truncate` of YaRN.

    Raises:
        ModelError: for a header that lacks keys, or has some that the configuration does not state.
    """
    kind = kind_of_header(str(header.values.get("general.architecture")))
    if kind is None:
        return None
    architecture = architectures()[kind]
    prefix = f"{architecture.name}."
    stated = {key.removeprefix(prefix): value for key, value in header.values.items() if key.startswith(prefix)}
    try:
        values = _values(header, architecture, stated, AutoConfig.for_model(kind))
        check_config(values, trust_remote_code=False)
        config = call_foreign(AutoConfig.for_model, kind, **values)
        restated = dict(call_foreign(lambda: list(architecture.metadata(config))))
    except (ValueError, CannotRun) as error:
        raise ModelError(f"model: {header.path}: its header cannot be read ({error}); fetch the file again") from error
    lacking = restated.keys() - stated.keys() - OPTIONAL
    refuse_names(header.path, "lacks hyperparameters", [prefix + key for key in lacking])
    relevant = {key: value for key, value in stated.items() if key in restated or key not in HARMLESS}
    unread = [key for key, value in relevant.items() if not is_same(value, restated.get(key))]
    refuse_names(
        header.path, "states hyperparameters that are not read", [f"{prefix}{key} = {stated[key]}" for key in unread]
    )
    reason = architecture.refuses(config)
    if reason is not None:
        raise ModelError(f"model: {header.path}: {reason}; use the model's safetensors")
    return config


def _values(
    header: GGUFHeader, architecture: Architecture, stated: Mapping[str, Any], default: PretrainedConfig
) -> dict[str, Any]:
    """Return the values of the configuration. Raises ValueError for keys with values of other types."""
    values: dict[str, Any] = {}
    for key, name in {**SIZES, **architecture.keys}.items():
        if key in stated:
            values[name] = _typed(key, stated[key], int)
    for key, kind, names in KEYS:
        config_name = next((name for name in names if hasattr(default, name)), None)
        if key in stated and config_name is not None:
            values[config_name] = _typed(key, stated[key], kind)
    tokens = header.values.get("tokenizer.ggml.tokens")
    if "vocab_size" not in values and isinstance(tokens, list):
        values["vocab_size"] = len(tokens)
    for token in TOKENS:
        number = header.values.get(f"tokenizer.ggml.{token}_token_id")
        values[f"{token.removesuffix('ding')}_token_id"] = number if isinstance(number, int) else None
    values["tie_word_embeddings"] = "output.weight" not in header.types
    values["rope_parameters"] = _rope(stated, rope_of(default))
    return values


def _rope(stated: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the rotary embedding. Raises ValueError for keys with values of other types."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _typed("rope.freq_base", stated.get("rope.freq_base"), float),
    }
    if stated.get("rope.scaling.type", "none") != "yarn":
        return rope
    lengths = {
        "factor": ("rope.scaling.factor", float),
        "original_max_position_embeddings": ("rope.scaling.original_context_length", int),
    }
    rope |= {name: _typed(key, stated.get(key), kind) for name, (key, kind) in lengths.items()}
    rope |= {name: _typed(key, stated.get(key, usual), float) for key, (name, usual) in BETAS.items()}
    rope |= {"rope_type": "yarn"} | {key: default[key] for key in ("truncate",) if key in default}
    if (magnitude := stated.get("rope.scaling.attn_factor")) is not None:
        rope["attention_factor"] = _typed("rope.scaling.attn_factor", magnitude, float) * yarn_mscale(rope["factor"])
    return rope


def _typed(key: str, value: Any, kind: type) -> Any:
    """Return a value as a whole number above 0, a finite number, or a bool. Raises ValueError for another value."""
    if kind is float:
        is_valid = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    else:
        is_valid = type(value) is kind and (kind is bool or value > 0)
    if not is_valid:
        raise ValueError(f"its {key} is {str(value)[:100]}")
    return kind(value)
