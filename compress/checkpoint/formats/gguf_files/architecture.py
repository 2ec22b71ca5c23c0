"""The architecture of a model in a GGUF file: names of tensors, hyperparameters, and changes of weights.

Names come from the tables of the `gguf` package. The changes of weights are those of llama.cpp's own converter: rows of
q and k in the order of its rotary embedding, and norms that contain the 1 that some models add when they run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import yaml
from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig

ROTATED = ("q_proj", "k_proj")
"""Modules whose rows are rotated by the position."""
WINDOW = "sliding_attention"
BIASES = ("attention_bias", "mlp_bias")
LOCAL_THETA = 10000.0
"""Base of the rotary embedding of blocks with a sliding window in llama.cpp."""
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp names and computes a kind of model; see architectures.yaml."""

    name: str
    activation: str
    biases: bool = False
    rotary_pairs: bool = False
    norm_shift: float = 0
    period: int | None = None

    def refuses(self, config: PretrainedConfig) -> str | None:
        """Why llama.cpp would compute another function than this model, or None."""
        act = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", self.activation)
        if act != self.activation:
            return f"its activation is {act}, but llama.cpp computes {self.activation}"
        if rope_of(config).get("rope_type", "default") not in ROPE_TYPES:
            return f"its rotary embedding is of the type {rope_of(config)['rope_type']!r}, not {', '.join(ROPE_TYPES)}"
        biased = next((key for key in BIASES if getattr(config, key, False)), None)
        if biased is not None and not self.biases:
            return f"{biased}: its linears have biases, which llama.cpp does not have for {self.name}"
        local = (getattr(config, "rope_parameters", None) or {}).get(WINDOW)
        if local is not None and local.get("rope_theta", LOCAL_THETA) != LOCAL_THETA:
            theta = f"{local['rope_theta']:g}"
            return f"the base of its local rotary embedding is {theta}, but llama.cpp computes {LOCAL_THETA:g}"
        scalar = getattr(config, "query_pre_attn_scalar", None)
        if scalar is not None and scalar != head_dim(config):
            return f"its queries are scaled by {scalar}, but llama.cpp scales them by the head size {head_dim(config)}"
        if self.period is not None and self._windows(config) != self._expected(config):
            return f"its sliding windows are not in {self.period - 1} of {self.period} blocks, as in llama.cpp"
        if self.period is None and WINDOW in (getattr(config, "layer_types", None) or ()):
            return "some of its blocks have a sliding window, which llama.cpp does not compute for it"
        return None

    def _windows(self, config: PretrainedConfig) -> list[bool]:
        return [kind == WINDOW for kind in getattr(config, "layer_types", None) or ()]

    def _expected(self, config: PretrainedConfig) -> list[bool]:
        assert self.period is not None
        return [(i + 1) % self.period != 0 for i in range(config.num_hidden_layers)]

    def rotated_heads(self, name: str, config: PretrainedConfig) -> int | None:
        """The heads of a tensor whose rows llama.cpp rotates in pairs; None: the rows keep their order.

        transformers rotates rows i and i + width / 2 of a head, llama.cpp rows 2 i and 2 i + 1. name: in the model.
        """
        module = name.rpartition(".")[0].rpartition(".")[2]
        if not self.rotary_pairs or module not in ROTATED:
            return None
        return config.num_attention_heads if module == ROTATED[0] else config.num_key_value_heads

    def tensor_names(self, blocks: int) -> Callable[[str], str | None]:
        """The name in the file for the name of a tensor in the model, of so many blocks; None if there is none."""
        import gguf  # an optional dependency

        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        table = gguf.get_tensor_name_map(kinds[self.name], blocks)
        return lambda name: table.get_name(name, (".weight", ".bias"))

    def shift(self, name: str, tensor_dims: int) -> float:
        """What is added to a tensor in the file."""
        return self.norm_shift if tensor_dims == 1 and name.endswith("norm.weight") else 0

    def metadata(self, config: PretrainedConfig) -> Iterator[tuple[str, int | float]]:
        """The hyperparameters by key, without the architecture's name before it."""
        window = getattr(config, "sliding_window", None)
        context = config.max_position_embeddings
        if self.period is None and window is not None and getattr(config, "use_sliding_window", True):
            context = min(context, window)  # up to this length the window has no effect
        yield "block_count", config.num_hidden_layers
        yield "context_length", context
        yield "embedding_length", config.hidden_size
        yield "feed_forward_length", config.intermediate_size
        yield "attention.head_count", config.num_attention_heads
        yield "attention.head_count_kv", config.num_key_value_heads
        yield "attention.key_length", head_dim(config)
        yield "attention.value_length", head_dim(config)
        yield "attention.layer_norm_rms_epsilon", float(config.rms_norm_eps)
        yield "rope.dimension_count", head_dim(config)
        yield "rope.freq_base", float(rope_of(config).get("rope_theta", 10000.0))
        yield "vocab_size", config.vocab_size
        if self.period is not None and window is not None:
            yield "attention.sliding_window", window
        for key, name in (("attn", "attn_logit_softcapping"), ("final", "final_logit_softcapping")):
            if (value := getattr(config, name, None)) is not None:
                yield f"{key}_logit_softcapping", float(value)
        if rope_of(config).get("rope_type") == "linear":
            yield "rope.scaling.factor", float(rope_of(config)["factor"])


def architecture_of(config: PretrainedConfig) -> Architecture | None:
    """The architecture of a configuration, or None for one that GGUF files are not written for."""
    return architectures().get(config.model_type)


@cache
def architectures() -> dict[str, Architecture]:
    """All architectures by the type in config.json."""
    text = files("compress.checkpoint.formats.gguf_files").joinpath("architectures.yaml").read_text(encoding="utf-8")
    return {kind: Architecture(**values) for kind, values in yaml.safe_load(text).items()}


def head_dim(config: PretrainedConfig) -> int:
    """The width of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the parameters of the rotary embedding; of blocks without a sliding window if these differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("full_attention", parameters)


def rope_factors(config: PretrainedConfig) -> Float[Tensor, " half"] | None:
    """The divisors of the rotary frequencies for rope_type llama3, which a tensor of the file holds; else None."""
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return None
    width, low, high = head_dim(config), rope["low_freq_factor"], rope["high_freq_factor"]
    old = rope["original_max_position_embeddings"]
    frequencies = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    waves = 2 * math.pi / frequencies
    smooth = (old / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = torch.where(waves > old / low, torch.full_like(waves, float(rope["factor"])), between)
    return torch.where(waves < old / high, torch.ones_like(waves), factors)
