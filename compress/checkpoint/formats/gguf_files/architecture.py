"""The architecture of a model in a GGUF file: names of tensors, hyperparameters, and changes of weights.

Names come from the tables of the `gguf` package. The changes of weights are those of llama.cpp's own converter: rows of
q and k in the order of its rotary embedding, fused linears in the order queries, keys, values, norms that contain the 1
that some models add when they run, and the matrices of all experts in one tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import yaml
from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig

from compress.checkpoint.containers.gguf import MEMBER, Entry

ROTATED = ("q_proj", "k_proj")
"""Modules whose rows are rotated by the position."""
WINDOW, CONV = "sliding_attention", "conv"
"""Kinds of blocks."""
USUAL_CONTEXT = 2048  # of models without learned positions that state none
ROPE_STEP = 4
"""Every which block has no rotary embedding in SmolLM3 (llama.cpp, smollm3.cpp)."""
BIASES = ("attention_bias", "mlp_bias")
LOCAL_THETA = 10000.0
"""Base of the rotary embedding of blocks with a sliding window in llama.cpp."""
ROPE_TYPES = ("default", "linear", "llama3")
LATENT = "kv_b_proj"
"""The linear of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) that makes keys and values of the latent
vector. The file has it as two tensors of one matrix for each head: of keys, transposed, and of values."""
LATENT_PARTS = "k_b_proj", "v_b_proj"
WITHOUT_QUERY_RANK = (26, 27)
"""Numbers of blocks of models without low-rank queries in llama.cpp (deepseek2.cpp)."""
EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""The number of an expert in the name of a tensor."""
MATRIX, CUBE = 2, 3  # axes
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
FLOAT32 = ("ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "token_types", "shortconv.conv")
"""Matrices that are always float32 (llama.cpp, conversion/base.py, prepare_tensors): some operations read no others."""
KEYS: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    ("attention.layer_norm_rms_epsilon", float, ("rms_norm_eps", "norm_eps")),
    ("attention.layer_norm_epsilon", float, ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")),
    ("vocab_size", int, ("vocab_size",)),
    ("attn_logit_softcapping", float, ("attn_logit_softcapping",)),
    ("final_logit_softcapping", float, ("final_logit_softcapping",)),
    ("expert_count", int, EXPERT_COUNTS),
    ("expert_used_count", int, ("num_experts_per_tok",)),
    ("expert_feed_forward_length", int, ("moe_intermediate_size",)),
    ("expert_shared_feed_forward_length", int, ("shared_expert_intermediate_size",)),
    ("use_parallel_residual", bool, ("use_parallel_residual",)),
    ("logit_scale", float, ("logit_scale", "logits_scaling")),
    ("attention.scale", float, ("attention_multiplier",)),
    ("embedding_scale", float, ("embedding_multiplier",)),
    ("residual_scale", float, ("residual_multiplier",)),
    ("shortconv.l_cache", int, ("conv_L_cache",)),
)
"""Hyperparameters: the key in the file, its type, and the keys of configurations, of which the first is taken."""


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp names and computes a kind of model; see architectures.yaml."""

    name: str
    activation: tuple[str, ...]
    biases: bool = False
    rotary_pairs: bool = False
    norm_shift: float = 0
    period: int | None = None
    requires: Mapping[str, Any] = field(default_factory=dict)
    ropes: tuple[str, ...] = ()
    square: bool = False
    fused: str | None = None
    transposed: tuple[str, ...] = ()
    gating: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    turns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    encoder: bool = False
    reads_header: bool = False

    def refuses(self, config: PretrainedConfig) -> str | None:
        """Why llama.cpp would compute another function than this model, or None."""
        kinds = ("hidden_activation", "activation_function", "activation", "hidden_act")
        act = next((value for kind in kinds if (value := getattr(config, kind, None))), self.activation[0])
        if act not in self.activation:
            return f"its activation is {act}, but llama.cpp computes {' or '.join(self.activation)}"
        rope, types = rope_of(config), (*ROPE_TYPES, *self.ropes)
        if rope.get("rope_type", "default") not in types:
            return f"its rotary embedding is of the type {rope['rope_type']!r}, not {', '.join(types)}"
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
        return (self._refuses_latent(config) if is_latent(config) else None) or self._refuses_values(config)

    def _refuses_latent(self, config: PretrainedConfig) -> str | None:
        """Why llama.cpp does not compute the latent attention or the experts of a model, or None."""
        rope = rope_of(config)
        mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        if rope.get("rope_type") == "yarn" and (not mscale or mscale != mscale_all_dim):
            return (
                f"its rotary embedding has mscale {mscale} and mscale_all_dim {mscale_all_dim}, but llama.cpp computes "
                "with two equal numbers above 0"
            )
        if getattr(config, "q_lora_rank", None) is None and config.num_hidden_layers not in WITHOUT_QUERY_RANK:
            numbers = " or ".join(map(str, WITHOUT_QUERY_RANK))
            return f"it has no q_lora_rank, and llama.cpp reads such models with {numbers} blocks only"
        if not getattr(config, "n_shared_experts", None):
            return "it has no shared experts, which llama.cpp expects"
        return None

    def _refuses_values(self, config: PretrainedConfig) -> str | None:
        """Why llama.cpp computes with other values than those of the configuration, or None."""
        for key, value in self.requires.items():
            stated = getattr(config, key, value)
            if stated != value and (stated or value):
                return f"{key} is {stated}, but llama.cpp computes {self.name} with {key} {value}"
        rotated = getattr(config, "no_rope_layers", None)
        if rotated and list(rotated) != [int((i + 1) % ROPE_STEP != 0) for i in range(config.num_hidden_layers)]:
            return f"its blocks without a rotary embedding are not every {ROPE_STEP}th, as in llama.cpp"
        width = head_dim(config) * config.num_attention_heads
        if self.square and width != config.hidden_size:
            return (
                f"its attention heads are {width} wide together, but llama.cpp computes {self.name} with heads as wide "
                f"as the model, {config.hidden_size}"
            )
        return None

    def _windows(self, config: PretrainedConfig) -> list[bool]:
        return [kind == WINDOW for kind in getattr(config, "layer_types", None) or ()]

    def _expected(self, config: PretrainedConfig) -> list[bool]:
        assert self.period is not None
        return [(i + 1) % self.period != 0 for i in range(config.num_hidden_layers)]

    def entry(self, name: str, shape: Sequence[int], config: PretrainedConfig, is_packed: bool) -> Entry:
        """How the file holds a tensor of the model.

        transformers rotates rows i and i + width / 2 of a head, llama.cpp rows 2 i and 2 i + 1.

        Args:
            name: in the model, that of the tensor itself also if it is packed.
            shape: of the stored tensor; its last axis counts bytes if it is packed.
            config: configuration of the model.
            is_packed: whether it holds the bytes of blocks.
        """
        path, _, leaf = name.rpartition(".")
        module, dims = path.rpartition(".")[2], len(shape)
        values: dict[str, Any] = {}
        if self.rotary_pairs and module in ROTATED:
            values["heads"] = config.num_attention_heads if module == ROTATED[0] else config.num_key_value_heads
        if module == self.fused:
            groups = key_value_heads(config)
            values |= {"groups": groups, "group_heads": config.num_attention_heads // groups + 2}
        if module in self.transposed and dims == MATRIX and leaf == "weight":
            values["transposed"] = not is_packed
        if dims == MATRIX and shape[0] == 1:
            values["axis"] = 0
        if dims == CUBE and shape[1] == 1:
            values["axis"] = 1
        if dims == 1 and module.endswith("norm") and leaf == "weight":
            values["shift"] = self.norm_shift
        if EXPERT.search(name) is not None:
            values["members"] = expert_count(config)
            name = EXPERT.sub(f".experts.{MEMBER}.", name)
        return Entry(name, **values)

    def parts(self, name: str, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """Return the tensors that the file has for a tensor of the model: their names there, and fields of `Entry`.

        Args:
            name: in the model.
            config: configuration of the model.
        """
        path, _, leaf = name.rpartition(".")
        stem, _, module = path.rpartition(".")
        if module in self.turns:
            linears = self.turns[module]
            return {
                f"{stem}.{linear}.{leaf}": {"stride": len(linears), "rows": (number, number + 1)}
                for number, linear in enumerate(linears)
            }
        if module != LATENT or leaf != "weight" or not is_latent(config):
            return {name: {}}
        keys, heads = config.qk_nope_head_dim, config.num_attention_heads
        rows = (0, keys), (keys, keys + config.v_head_dim)
        return {
            f"{stem}.{part}.{leaf}": {"stacked": heads, "rows": between, "transposed": part == LATENT_PARTS[0]}
            for part, between in zip(LATENT_PARTS, rows, strict=True)
        }

    def tensor_names(self, blocks: int) -> Callable[[str], str | None]:
        """The name in the file for the name of a tensor in the model, of so many blocks; None if there is none.

        The tensors of all experts have one name.
        """
        import gguf  # an optional dependency

        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        table = gguf.get_tensor_name_map(kinds[self.name], blocks)

        def name_in_file(name: str) -> str | None:
            name = EXPERT.sub(".experts.", name)
            for part, other in self.names.items():
                name = name.replace(part, other)
            return table.get_name(name, (".weight", ".bias"))

        return name_in_file

    def metadata(self, config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
        """The hyperparameters by key, without the architecture's name before it."""
        window = getattr(config, "sliding_window", None)
        context = getattr(config, "max_position_embeddings", None) or getattr(config, "seq_length", USUAL_CONTEXT)
        if self.period is None and window is not None and getattr(config, "use_sliding_window", True):
            context = min(context, window)  # up to this length the window has no effect
        yield "block_count", config.num_hidden_layers
        yield "context_length", context
        yield "embedding_length", config.hidden_size
        yield "feed_forward_length", feed_forward_width(config)
        yield "attention.head_count", config.num_attention_heads
        heads, kinds = key_value_heads(config), getattr(config, "layer_types", None) or ()
        if is_latent(config):
            yield from _latent_metadata(config)
        else:
            yield (
                "attention.head_count_kv",
                [0 if kind == CONV else heads for kind in kinds] if CONV in kinds else heads,
            )
            yield "attention.key_length", head_dim(config)
            yield "attention.value_length", head_dim(config)
        if self.gating is not None:
            yield "expert_gating_func", self.gating
        if self.encoder:
            yield "attention.causal", False
        for key, kind, names in KEYS:
            value = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
            if value is not None:
                yield key, kind(value)
        for key, name in self.keys.items():
            yield key, getattr(config, name)
        if self.period is not None and window is not None:
            yield "attention.sliding_window", window
        yield from _rotary_metadata(config)


def _latent_metadata(config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    """The hyperparameters of latent attention, as one head of keys and values, and of its experts."""
    rotary = config.qk_rope_head_dim
    yield "attention.head_count_kv", 1
    yield "attention.key_length", config.kv_lora_rank + rotary
    yield "attention.value_length", config.kv_lora_rank
    yield "attention.key_length_mla", config.qk_nope_head_dim + rotary
    yield "attention.value_length_mla", config.v_head_dim
    yield "attention.kv_lora_rank", config.kv_lora_rank
    if config.q_lora_rank is not None:
        yield "attention.q_lora_rank", config.q_lora_rank
    kinds = getattr(config, "mlp_layer_types", None)
    yield "leading_dense_block_count", config.first_k_dense_replace if kinds is None else kinds.count("dense")
    yield "expert_shared_count", config.n_shared_experts
    yield "expert_weights_scale", float(config.routed_scaling_factor)
    yield "expert_weights_norm", bool(config.norm_topk_prob)
    if (getattr(config, "n_group", None) or 1) > 1 and getattr(config, "topk_method", None) != "greedy":
        yield "expert_group_count", config.n_group
        yield "expert_group_used_count", config.topk_group


def _rotary_metadata(config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    """The hyperparameters of the rotary embedding; none without one."""
    rope = rope_of(config)
    if not rope:
        return
    yield "rope.dimension_count", rotary_width(config)
    yield "rope.freq_base", float(rope.get("rope_theta", 10000.0))
    if rope.get("rope_type") == "linear":
        yield "rope.scaling.factor", float(rope["factor"])
    if rope.get("rope_type") == "yarn":
        yield "rope.scaling.type", "yarn"
        yield "rope.scaling.factor", float(rope["factor"])
        yield "rope.scaling.original_context_length", int(rope["original_max_position_embeddings"])
        yield "rope.scaling.yarn_beta_fast", float(rope.get("beta_fast") or 32)
        yield "rope.scaling.yarn_beta_slow", float(rope.get("beta_slow") or 1)
        if is_latent(config):
            yield "rope.scaling.yarn_log_multiplier", 0.1 * rope["mscale_all_dim"]  # deepseek2.cpp divides by 0.1
        elif (magnitude := yarn_magnitude(rope) / yarn_mscale(rope["factor"])) != 1:
            yield "rope.scaling.attn_factor", magnitude  # llama.cpp (llama-context.cpp) multiplies by the other
    if rope.get("rope_type") == "longrope":
        original = int(rope["original_max_position_embeddings"])
        scale = config.max_position_embeddings / original
        stated = rope.get("attention_factor")
        # LongRoPE (arXiv 2402.13753), as in transformers: sqrt(1 + ln(s) / ln(L))
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        yield "rope.scaling.type", "longrope"
        yield "rope.scaling.original_context_length", original
        yield "rope.scaling.attn_factor", float(factor if stated is None else stated)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the magnitude of queries and keys whose positions are divided by a factor (YaRN, arXiv 2309.00071)."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def yarn_magnitude(rope: Mapping[str, Any]) -> float:
    """Return by what transformers multiplies rotated queries and keys."""
    stated, mscale, all_dim = rope.get("attention_factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if stated is not None:
        return stated
    if mscale and all_dim:
        return yarn_mscale(rope["factor"], mscale) / yarn_mscale(rope["factor"], all_dim)
    return yarn_mscale(rope["factor"])


def rounds_yarn(config: PretrainedConfig) -> bool:
    """Return whether llama.cpp (ggml_rope_yarn_corr_dims) rounds the ends of YaRN's ramp where the model does not."""
    rope = rope_of(config)
    return rope.get("rope_type") == "yarn" and not rope.get("truncate", True)


def architecture_of(config: PretrainedConfig) -> Architecture | None:
    """The architecture of a configuration, or None for one that GGUF files are not written for."""
    return architectures().get(config.model_type)


@cache
def architectures() -> dict[str, Architecture]:
    """All architectures by the type in config.json."""
    text = files("compress.checkpoint.formats.gguf_files").joinpath("architectures.yaml").read_text(encoding="utf-8")
    lists, stated = ("activation", "ropes", "transposed"), yaml.safe_load(text)
    architecture_by_kind = {}
    for kind, entries in stated.items():
        values: dict[str, Any] = {key: tuple(value) if key in lists else value for key, value in entries.items()}
        architecture_by_kind[kind] = Architecture(**values)
    return architecture_by_kind


def head_dim(config: PretrainedConfig) -> int:
    """The width of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def is_latent(config: PretrainedConfig) -> bool:
    """Whether attention keeps a latent vector of low rank instead of keys and values (DeepSeek-V2)."""
    return getattr(config, "kv_lora_rank", None) is not None


def rotary_width(config: PretrainedConfig) -> int:
    """The number of rows of a head that are rotated by the position."""
    if is_latent(config):
        return config.qk_rope_head_dim
    part = rope_of(config).get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return int(head_dim(config) * (1 if part is None else part))


def key_value_heads(config: PretrainedConfig) -> int:
    """The number of heads of keys and values."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "num_attention_heads")
    return next(value for name in names if (value := getattr(config, name, None)))


def feed_forward_width(config: PretrainedConfig) -> int:
    """The width of the feed-forward layers."""
    if getattr(config, "block_auto_adjust_ff_dim", False):
        # LFM2 (transformers, Lfm2MLP): two thirds, times a factor, rounded up to a multiple
        width = int(2 * config.intermediate_size / 3)
        factor, multiple = config.block_ffn_dim_multiplier, config.block_multiple_of
        width = width if factor is None else int(factor * width)
        return multiple * ((width + multiple - 1) // multiple)
    names = ("intermediate_size", "ffn_hidden_size", "n_inner")
    return next((value for name in names if (value := getattr(config, name, None))), 4 * config.hidden_size)


def expert_count(config: PretrainedConfig) -> int | None:
    """The number of experts of each block, or None."""
    return next((value for name in EXPERT_COUNTS if (value := getattr(config, name, None))), None)


def rope_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the parameters of the rotary embedding; of blocks without a sliding window if these differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("full_attention", parameters)


def rope_factors(config: PretrainedConfig) -> dict[str, Float[Tensor, " half"]]:
    """The divisors of the rotary frequencies that tensors of the file hold, by their names; none for most types."""
    rope = rope_of(config)
    if rope.get("rope_type") == "longrope":
        factors = {"rope_factors_long.weight": rope["long_factor"], "rope_factors_short.weight": rope["short_factor"]}
        return {name: torch.tensor(values, dtype=torch.float32) for name, values in factors.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    width, low, high = rotary_width(config), rope["low_freq_factor"], rope["high_freq_factor"]
    old = rope["original_max_position_embeddings"]
    frequencies = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    waves = 2 * math.pi / frequencies
    smooth = (old / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = torch.where(waves > old / low, torch.full_like(waves, float(rope["factor"])), between)
    return {"rope_freqs.weight": torch.where(waves < old / high, torch.ones_like(waves), factors)}


def keeps_float32(name: str) -> bool:
    """Whether a matrix of a file is float32 whatever the dtype of the others. name: in the file."""
    plain = name.removesuffix(".weight")
    return any(plain == kind or plain.endswith(f".{kind}") for kind in FLOAT32)
