"""Check that a GGUF file is read completely: that no tensor is missing, and that none and no hyperparameter is ignored.

transformers fills tensors that a file lacks with random numbers, and skips tensors and keys that it does not know. This
changes what the model computes and is therefore an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_TO_TRANSFORMERS_MAPPING,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from compress.checkpoint.containers.gguf import CONFIG
from compress.checkpoint.formats.gguf_files.architecture import head_dim, rope_factors, rope_of
from compress.checkpoint.formats.gguf_files.vocabulary import SPECIAL, TOKENIZER
from compress.checkpoint.sources.gguf_parts import open_parts
from compress.checkpoint.sources.untrusted import LARGEST_COUNT, check_config
from compress.errors import CannotRun, ModelError, call_foreign

WITHOUT_EFFECT = frozenset(
    {
        "context_length",
        "vocab_size",
        "tensor_data_layout",
        "decoder_start_token_id",
        "pooling_type",
        # sizes, which the shapes of the tensors state too
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        # of scaled rotary embeddings, whose type and factor are compared
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_log_multiplier",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
"""Keys that do not change what a model computes, without the architecture's name before them."""
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Names of pre-tokenizers that isolate digits before GPT-2's expression divides the rest (llama.cpp, llama-vocab.cpp).

transformers does not know them."""
MOST = 5  # names in a message
FREQUENCIES = "rope_freqs.weight"
"""The tensor of the divisors of the rotary frequencies."""
BIAS = "attn_q.bias"
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""The scaled rotary embedding of Llama 3.1 to 3.3 (Meta's code, apply_scaling), but for its factor and length."""


@dataclass(frozen=True)
class GGUFHeader:
    """The metadata of a GGUF file by key, and the number type of each tensor by name.

    weights: the number of the values of all tensors. frequencies: the divisors of the rotary frequencies, if the file
    holds some.
    """

    path: Path
    values: Mapping[str, Any]
    types: Mapping[str, str]
    weights: int
    frequencies: Float[Tensor, " half"] | None = None


def header_of(path: Path) -> GGUFHeader:
    """Read the header of a file. Raises ModelError for a part of a split file, and the errors of the `gguf` package."""
    [reader] = open_parts([path])
    values = {name: field.contents() for name, field in reader.fields.items()}
    types = {str(tensor.name): tensor.tensor_type.name for tensor in reader.tensors}
    divisors = [tensor.data for tensor in reader.tensors if tensor.name == FREQUENCIES and types[FREQUENCIES] == "F32"]
    weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return GGUFHeader(path, values, types, weights, torch.tensor(divisors[0]) if divisors else None)


def own_config(header: GGUFHeader) -> PretrainedConfig | None:
    """Return the configuration that compress has written into a file; None for a file of another program.

    Raises:
        ModelError: for a configuration that cannot be read.
    """
    text = header.values.get(CONFIG)
    if not isinstance(text, str):
        return None
    try:
        values = json.loads(text)
        if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
            raise ValueError("it is no JSON object with a model_type")
        check_config(values, trust_remote_code=False)
        return call_foreign(AutoConfig.for_model, **values)
    except (ValueError, RecursionError, CannotRun) as error:
        raise ModelError(
            f"model: {header.path}: its {CONFIG} cannot be read ({error}); fetch the file again"
        ) from error


def own_tokenizer(header: GGUFHeader) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer whose tokenizer.json compress has written into a file, with its special tokens, or None.

    Raises:
        Exception: that of the tokenizers package for a text that it cannot read.
    """
    text = header.values.get(TOKENIZER)
    if not isinstance(text, str):
        return None
    tokenizer = Tokenizer.from_str(text)
    ids = {name: header.values.get(f"tokenizer.ggml.{key}_token_id") for name, key in {**SPECIAL, "cls": "cls"}.items()}
    tokens = {f"{name}_token": tokenizer.id_to_token(int(number)) for name, number in ids.items() if number is not None}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)


def isolate_digits(header: GGUFHeader, tokenizer: PreTrainedTokenizerBase) -> None:
    """Divide texts as the file names it, where transformers does not know the name: a space before a digit is apart."""
    stated = header.values.get("tokenizer.ggml.pre")
    if header.values.get("tokenizer.ggml.model") != "gpt2" or stated not in DIGITS:
        return
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend: Any = tokenizer
    backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def complete_config(header: GGUFHeader, config: PretrainedConfig) -> Set[str]:
    """State in a configuration what transformers does not read of a file: scaled rotary embeddings, and biases.

    Returns:
        Names of the tensors that the configuration replaces. What it cannot state is left to the other checks.
    """
    name = str(header.values["general.architecture"])
    rope = rope_of(config)
    plain = rope.get("rope_type", "default") == "default" and "rope_theta" in rope
    factor = header.values.get(f"{name}.rope.scaling.factor", header.values.get(f"{name}.rope.scale_linear", 1.0))
    kind = header.values.get(f"{name}.rope.scaling.type", "linear")
    if plain and kind == "linear" and isinstance(factor, int | float) and factor > 1:
        rope |= {"rope_type": "linear", "factor": float(factor)}
    if f"blk.0.{BIAS}" in header.types and getattr(config, "attention_bias", None) is False:
        config.attention_bias = True
    divisors = header.frequencies
    if not plain or divisors is None or rope["rope_type"] != "default":
        return frozenset()
    if bool((divisors == 1).all()):
        return {FREQUENCIES}
    unscaled, factor = dict(rope), round(float(divisors.max()), 4)
    stated = header.values.get(f"{name}.rope.scaling.original_context_length")
    for positions in (
        *([stated] if isinstance(stated, int) else []),
        *(1 << exponent for exponent in range(20, 4, -1)),
    ):
        rope |= {**LLAMA3, "factor": factor, "original_max_position_embeddings": positions}
        factors = rope_factors(config).get(FREQUENCIES)
        if factors is not None and factors.shape == divisors.shape and torch.allclose(factors, divisors, rtol=1e-4):
            return {FREQUENCIES}
    rope.clear()
    rope |= unscaled
    return frozenset()


def check_counts(header: GGUFHeader) -> None:
    """Raise ModelError for counts of layers, heads or experts that are negative, or that take long to build."""
    for key, value in header.values.items():
        if key.endswith("_count") and isinstance(value, int) and not 0 <= value <= LARGEST_COUNT:
            raise ModelError(
                f"model: {header.path}: its {key} is {value}, but it must be from 0 to {LARGEST_COUNT}; fetch the file "
                "again"
            )


def check_keys(header: GGUFHeader, config: PretrainedConfig) -> None:
    """Raise ModelError for hyperparameters that the configuration, as transformers reads it, does not state.

    A key is accepted if transformers reads it, if it has no effect, or if its value is that of the configuration.
    """
    name = str(header.values["general.architecture"])
    mappings = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    read_keys = {
        key for key, target in (mappings.get(name) or mappings.get(config.model_type, {})).items() if target is not None
    }
    stated, unread = dict(_stated(config)), []
    for key, value in header.values.items():
        short = key.removeprefix(f"{name}.")
        if short != key and short not in read_keys | WITHOUT_EFFECT and not is_same(value, stated.get(short)):
            unread.append(f"{key} = {value if isinstance(value, str | float | int) else '[...]'}")
    refuse_names(header.path, "states hyperparameters that are not read", unread)


def check_tensors(header: GGUFHeader, model: PreTrainedModel, replaced: Set[str]) -> None:
    """Raise ModelError for tensors of the file that transformers does not read into the model; its data is not used.

    A file that has fewer weights than the model lacks tensors: it is refused before the model is built.

    replaced: names of tensors that the configuration of the model replaces.
    """
    kind = TENSOR_PROCESSORS.get(str(header.values["general.architecture"]), TensorProcessor)
    read_names = get_gguf_hf_weights_map(model, kind(config=model.config.to_dict()))
    # stacked experts are in the map without the suffix
    unread = [
        name for name in header.types if name not in read_names and name.removesuffix(".weight") not in read_names
    ]
    check_none_unread(header, set(unread) - replaced)
    if header.weights < sum(parameter.numel() for parameter in model.parameters()):  # of tied ones, one counts
        stored = {name.removesuffix(".weight") for name in header.types}
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        absent = {name for file_name, name in read_names.items() if file_name.removesuffix(".weight") not in stored}
        check_none_missing(header, absent - tied)


def check_none_unread(header: GGUFHeader, names: Iterable[str]) -> None:
    """Raise ModelError if there are names of tensors that are not read."""
    refuse_names(header.path, "holds tensors that are not read", names)


def check_none_missing(header: GGUFHeader, names: Iterable[str]) -> None:
    """Raise ModelError if there are names of tensors of the model that the file lacks."""
    refuse_names(header.path, "lacks tensors of the model", names)


def _stated(config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    """The values of keys that transformers does not read for all architectures, as its configuration has them."""
    rope = rope_of(config)
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    sliding = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention", rope)
    if hasattr(config, "hidden_size") and getattr(config, "num_attention_heads", None):
        yield "rope.dimension_count", int(head_dim(config) * (1 if part is None else part))
    yield "rope.freq_base", rope.get("rope_theta")
    yield "rope.freq_base_swa", sliding.get("rope_theta")
    if rope.get("rope_type", "default") == "linear":
        yield from (("rope.scaling.type", "linear"), ("rope.scaling.factor", rope["factor"]))
        yield "rope.scale_linear", rope["factor"]
    if rope.get("rope_type", "default") == "default":
        yield from (("rope.scaling.type", "none"), ("rope.scaling.factor", 1), ("rope.scaling.attn_factor", 1))
        yield "rope.scale_linear", 1
    yield "attention.causal", True
    yield "attention.sliding_window", getattr(config, "sliding_window", None)
    yield "ssm.dt_b_c_rms", False
    yield "expert_weights_norm", getattr(config, "norm_topk_prob", None)
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_parallel_residual", "logit_scale"):
        yield name, getattr(config, name, None)


def is_same(value: Any, stated: Any) -> bool:
    """Whether values are equal; the file holds floats in 32 bits."""
    if isinstance(value, int | float) and isinstance(stated, int | float):
        return math.isclose(value, stated, rel_tol=1e-6)
    return stated is not None and value == stated


def refuse_names(path: Path, reason: str, names: Iterable[str]) -> None:
    """Raise ModelError for a file that would be read as another model, if there are names."""
    listed = sorted(names)
    if listed:
        more = f" and {len(listed) - MOST} more" if len(listed) > MOST else ""
        raise ModelError(
            f"model: {path} {reason}: {', '.join(listed[:MOST])}{more}; it would be another model: "
            "fetch a complete file, or use the model's safetensors"
        )
