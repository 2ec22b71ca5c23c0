"""The checkpoints that are compared: those that compress writes, and those that other programs write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gguf_families import ENCODERS
from gguf_families import FAMILIES as GGUF_FAMILIES
from owners import AUTOAWQ, BITSANDBYTES, COMPRESSED_TENSORS, GPTQMODEL, LLAMACPP, MLX, ONNX, OPENVINO, VLLM, Owner
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

TOLERANCE = {"float16": 2e-2, "float32": 1e-4}
"""Of logits, relative to the largest: kernels add up products of 16 bits in another order."""
OF_BFLOAT16 = 2e-2  # 4-bit floats of compressed-tensors: it dequantizes in bfloat16
OF_INPUTS = (
    5e-2  # quantized inputs: a sum in another order moves a value to the next step; bitsandbytes has 127 per sign.
)
OF_FOUR_BIT_INPUTS = 2e-1  # the same with steps of 4 bits, after weights that transformers rounds to bfloat16
OF_ROUTERS = 1e-1  # the same before a router, which may then choose another expert for a token
OF_FP8_INPUTS = 1e-1  # the same with steps of fp8 after activations of 16 bits, in either format
OF_SERVERS = 5e-3  # log-probabilities of a server that computes in float16 with the same weights
OF_EXACT_SERVERS = 1e-4  # of a program that computes in float32, without rounded inputs
OF_HALF_SCALES = 1e-3  # the same, where it stores scales in float16 and the checkpoint has them in float32
# llama.cpp rounds inputs to 8 bits in blocks of 32 or 256, and compress does not.


SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "phi3": {},
    "olmo2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "olmoe": EXPERTS,
}
"""Options of random models by model_type: dense with and without biases and tied weights, and mixtures of experts."""

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
}
"""Sizes that the attention and the products of vLLM have on a CPU."""
SERVED: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 64, "norm_topk_prob": True},
}
"""Options of the random models that servers run, by model_type: dense, tied, with biases, with heads of queries that
share keys, and mixtures of experts with and without a shared expert."""
MIXTURES = ("qwen2_moe", "qwen3_moe")


def tiny_model(family: str, served: bool = False) -> PreTrainedModel:
    """Return a random model in which no weight is 0 or 1.

    Args:
        family: a key of `TINY`, or of `SERVED`.
        served: whether it has the sizes for servers.
    """
    torch.manual_seed(0)
    options = {**WIDE, **SERVED[family]} if served else TINY[family]
    config = AutoConfig.for_model(family.partition(",")[0], **{**SIZES, **options})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    return model


@dataclass(frozen=True, eq=False)
class Case:
    """A checkpoint. writer: the program that writes it, or compress. label: its kind.

    passes: of compress, as a recipe spells them. tolerance: of logits; None: that of the reader's dtype. everywhere:
    whether it is made of every model, not only of the small one. family: of a `tiny_model`, or of a `gguf_model`, instead of
    the small one. refused: words of the error with which the reader refuses it; such a row agrees if it does. dtype: in
    which a server computes, instead of that of the reader.
    """

    format: str
    label: str
    reader: Owner
    passes: tuple[dict[str, Any], ...] = ()
    tolerance: float | None = None
    writer: str = "compress"
    everywhere: bool = False
    family: str | None = None
    refused: str | None = None
    dtype: str | None = None

    @property
    def limit(self) -> float:
        """The greatest difference of logits."""
        return self.tolerance or TOLERANCE[self.reader.dtype]


def cases() -> Iterator[Case]:
    """All checkpoints: every grid, group size, with and without zero points and act-order."""
    yield from _integers()
    yield from _gptq_and_awq()
    yield from _floats()
    yield from _bitsandbytes()
    yield from _gguf()
    yield from _mlx()
    yield from _onnx()
    yield from _openvino()
    yield from _vllm()
    yield from _of_others()


def _integers() -> Iterator[Case]:
    """The integer layouts of compressed-tensors."""
    for bits in (2, 3, 4, 5, 6, 7, 8):
        sizes = (32, 64, "channel") if bits in (3, 4) else (32, "channel")
        for size in sizes:  # 64 does not divide all widths of the small model: groups are stored smaller
            for symmetric in (True,) if size == 64 else (True, False):  # two group sizes with zero points: no reader
                options = {"weights": f"int{bits}", "group_size": size, "symmetric": symmetric}
                label, wide = f"int{bits} {size} {_kind(symmetric)}", (bits, size) == (4, 32)
                yield Case("compressed-tensors", label, COMPRESSED_TENSORS, ({"rtn": options},), everywhere=wide)
    mixed = {"weights": "int4", "group_size": 32, "overrides": {"*.down_proj": {"weights": "int8"}}}
    yield Case("compressed-tensors", "int4 32 sym, some int8", COMPRESSED_TENSORS, ({"rtn": mixed},))
    ordered = {"weights": "int4", "group_size": 32, "act_order": "static"}
    yield Case("compressed-tensors", "int4 32 sym act-order static", COMPRESSED_TENSORS, ({"gptq": ordered},))
    for scale in ("token", "static"):
        inputs = {"weights": "int8", "group_size": "channel", "activations": "int8", "activation_scale": scale}
        label, wide = f"int8 channel sym, int8 inputs {scale}", scale == "token"
        yield Case("compressed-tensors", label, COMPRESSED_TENSORS, ({"rtn": inputs},), OF_INPUTS, everywhere=wide)


def _gptq_and_awq() -> Iterator[Case]:
    """The formats of GPTQModel and AutoAWQ. Symmetric gptq is of the first version, other of the second."""
    for bits in (2, 3, 4, 8):
        for size in (32, "channel"):
            for symmetric in (True, False):
                options = {"weights": f"int{bits}", "group_size": size, "symmetric": symmetric}
                label, wide = f"int{bits} {size} {_kind(symmetric)}", (bits, size) == (4, 32)
                version = "v1" if symmetric else "v2"
                yield Case("gptq", f"{label} {version}", GPTQMODEL, ({"rtn": options},), everywhere=wide)
                if bits == 4:
                    yield Case("awq", label, GPTQMODEL, ({"rtn": options},), everywhere=wide)
                    yield Case("awq", label, AUTOAWQ, ({"rtn": options},), everywhere=wide and not symmetric)
        for order in ("static", "group"):
            ordered = {"weights": f"int{bits}", "group_size": 32, "act_order": order}
            label, wide = f"int{bits} 32 sym v1 act-order {order}", (bits, order) == (4, "group")
            yield Case("gptq", label, GPTQMODEL, ({"gptq": ordered},), everywhere=wide)
    zeros = {"weights": "int4", "group_size": 32, "symmetric": False, "act_order": "group"}
    yield Case("gptq", "int4 32 asym v2 act-order group", GPTQMODEL, ({"gptq": zeros},))
    overrides = {"*.down_proj": {"weights": "int8"}, "*.o_proj": {"weights": "none"}, "*.v_proj": {"group_size": 64}}
    mixed = {"weights": "int4", "group_size": 32, "overrides": overrides}
    yield Case("gptq", "int4 32 sym v1, dynamic: some int8, some dense", GPTQMODEL, ({"rtn": mixed},))
    skipped = {"weights": "int4", "group_size": 32, "overrides": {"*.o_proj": {"weights": "none"}}}
    yield Case("awq", "int4 32 sym, some dense", GPTQMODEL, ({"rtn": skipped},))
    yield Case("awq", "int4 32 sym, some dense", AUTOAWQ, ({"rtn": skipped},))


def _floats() -> Iterator[Case]:
    """The float layouts of compressed-tensors."""
    fp8 = {"weights": "fp8_e4m3", "group_size": "channel"}
    block = {"weights": "fp8_e4m3", "group_size": 32, "block_rows": 32}
    found: list[tuple[str, dict[str, Any], float | None, bool]] = [
        ("fp8 channel", fp8, None, True),
        ("fp8 tensor", fp8 | {"group_size": "tensor"}, None, False),
        ("fp8 channel, fp8 inputs token", fp8 | {"activations": "fp8_e4m3"}, OF_INPUTS, False),
        (
            "fp8 tensor, fp8 inputs static",
            fp8 | {"group_size": "tensor", "activations": "fp8_e4m3", "activation_scale": "static"},
            OF_INPUTS,
            False,
        ),
        ("fp8 32x32 blocks", block, None, True),
        ("mxfp4", {"weights": "mxfp4"}, OF_BFLOAT16, True),
        ("nvfp4", {"weights": "nvfp4"}, OF_BFLOAT16, True),
        ("mxfp8", {"weights": "mxfp8"}, OF_BFLOAT16, False),
        ("mxfp4 with mxfp4 inputs", {"weights": "mxfp4", "activations": "mxfp4"}, OF_INPUTS, True),
        ("mxfp8 with mxfp8 inputs", {"weights": "mxfp8", "activations": "mxfp8"}, OF_INPUTS, False),
        (
            "nvfp4 with nvfp4 inputs",
            {"weights": "nvfp4", "activations": "nvfp4", "activation_scale": "static"},
            OF_FOUR_BIT_INPUTS,
            True,
        ),
        (
            "int4 32 sym, fp8 inputs token",
            {"weights": "int4", "group_size": 32, "activations": "fp8_e4m3"},
            OF_INPUTS,
            False,
        ),
    ]
    for label, options, limit, wide in found:
        yield Case("compressed-tensors", label, COMPRESSED_TENSORS, ({"rtn": options},), limit, everywhere=wide)


def _bitsandbytes() -> Iterator[Case]:
    for grid in ("nf4", "nf4_bnb_dq", "fp4_bnb", "fp4_bnb_dq"):
        options = {"weights": grid, "group_size": 32}
        wide = grid in ("nf4", "nf4_bnb_dq")
        yield Case("bitsandbytes", f"{grid} 32", BITSANDBYTES, ({"rtn": options},), everywhere=wide)
    yield Case("bitsandbytes", "int8 channel", BITSANDBYTES, ({"llm_int8": {}},), OF_INPUTS, everywhere=True)


def _gguf() -> Iterator[Case]:
    """Every block type, and every architecture; super-blocks where they divide the inputs (none of the small model)."""
    for grid in ("int4_signed", "uint4", "int5_signed", "uint5", "int8"):
        options = {"weights": grid, "group_size": 32}
        yield Case("gguf", f"{grid} 32", LLAMACPP, ({"rtn": options},), OF_INPUTS, everywhere=grid == "int4_signed")
    for scheme in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"):
        yield Case("gguf", scheme, LLAMACPP, ({"scheme": scheme},), OF_INPUTS, everywhere=True)
    for family in GGUF_FAMILIES:
        is_latent = "kv_lora_rank" in GGUF_FAMILIES[family][1]
        passes = ({"rtn": {"weights": "int8", "group_size": 32, "ignore": ["*.kv_b_proj"] if is_latent else []}},)
        yield Case("gguf", f"int8 32, {family}", LLAMACPP, passes, OF_INPUTS, family=family)
    for grid in ("mxfp4", "int4_signed"):
        passes = ({"rtn": {"weights": grid, "group_size": 32}},)
        yield Case("gguf", f"{grid} 32, gpt-oss", LLAMACPP, passes, OF_INPUTS, family="gpt-oss")
    for family in ENCODERS:
        passes = ({"rtn": {"weights": "int8", "group_size": 32}},)
        yield Case("gguf", f"int8 32, embedding of {family}", LLAMACPP, passes, OF_INPUTS, family=family)


def _mlx() -> Iterator[Case]:
    """Every width and group size; embeddings; mixed layers; and the structures that mlx-lm names or stacks otherwise."""
    for bits in (2, 3, 4, 5, 6, 8):
        for grid, symmetric in ((f"int{bits}", True), (f"int{bits}", False), (f"uint{bits}", False)):
            options = {"weights": grid, "group_size": 32, "symmetric": symmetric}
            label = f"{grid} 32" if grid[0] == "u" else f"{grid} 32 {_kind(symmetric)}"
            yield Case("mlx", label, MLX, ({"rtn": options},))
    for size in (64, 128, "channel"):  # layers whose inputs they do not divide have smaller ones
        yield Case("mlx", f"uint4 {size}", MLX, ({"rtn": {"weights": "uint4", "group_size": size}},))
    overrides = {"*.down_proj": {"weights": "uint8"}, "*.o_proj": {"weights": "none"}}
    mixed = {"rtn": {"weights": "uint4", "group_size": 32, "overrides": overrides}}
    ends = {"rtn": {"weights": "uint6", "group_size": 32, "targets": ["embed_tokens", "lm_head"]}}
    yield Case("mlx", "uint4 32, some uint8, some dense", MLX, (mixed,))
    yield Case("mlx", "uint4 32, tied embedding uint6", MLX, ({"rtn": {"weights": "uint4", "group_size": 32}}, ends))
    for family in TINY:
        passes = ({"rtn": {"weights": "uint4", "group_size": 32}}, ends)
        yield Case("mlx", f"uint4 32, embeddings uint6, {family}", MLX, passes, family=family)


INT4 = {"weights": "int4", "group_size": 32}
INT4_ZEROS = INT4 | {"symmetric": False}
INT8 = {"weights": "int8", "group_size": "channel"}
FP8 = {"weights": "fp8_e4m3", "group_size": "channel", "activations": "fp8_e4m3"}
NO_EXPERTS = {"ignore": ["*.experts.*"]}


def _onnx() -> Iterator[Case]:
    """What `compress export --format onnx` takes, exported by the program's own builder; and what it refuses."""
    overrides = {"*.down_proj": {"weights": "int8"}}
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("compressed-tensors", "int4 32 sym", INT4),
        ("compressed-tensors", "int4 channel asym", INT4_ZEROS | {"group_size": "channel"}),
        ("gptq", "int4 32 sym v1", INT4),
        ("gptq", "int4 32 asym v2", INT4_ZEROS),
        ("awq", "int4 32 sym", INT4),
        ("awq", "int4 32 asym", INT4_ZEROS),
        ("gptq", "int8 32 sym v1", INT8 | {"group_size": 32}),
        ("compressed-tensors", "int4 32 sym, some int8", INT4 | {"overrides": overrides}),
    ]
    kinds.append(("gptq", "int4 32 sym v1, some int8", INT4 | {"overrides": overrides}))
    for form, label, options in kinds:
        yield Case(form, label, ONNX, ({"rtn": options},), OF_INPUTS)
    dense = {"rtn": INT4 | {"overrides": {"*.o_proj": {"weights": "none"}}}}
    yield Case("awq", "int4 32 sym, some dense", ONNX, (dense,), refused="is dense, but the model builder")
    for family in ("llama", "qwen2", "qwen3"):
        yield Case("awq", f"int4 32 asym, {family}", ONNX, ({"rtn": INT4_ZEROS},), OF_INPUTS, family=family)
    yield Case("dense", "2:4", ONNX, ({"magnitude": {"pattern": "2:4"}},), OF_SERVERS)
    zeros = INT8 | {"group_size": 32, "symmetric": False}
    yield Case("gptq", "int8 32 asym v2", ONNX, ({"rtn": zeros},), refused="misreads zero points of format gptq")
    yield Case("gptq", "int3 32 sym v1", ONNX, ({"rtn": INT4 | {"weights": "int3"}},), refused="not of int3")
    for family in ("qwen2_moe",):
        passes = ({"rtn": INT4},)
        yield Case("awq", f"int4 32 sym, {family}", ONNX, passes, family=family, refused="does not know")


def _openvino() -> Iterator[Case]:
    """What `compress export --format openvino` takes, whose codes become constants of the program's model."""
    overrides = {"*.down_proj": {"weights": "int8"}, "*.o_proj": {"weights": "none"}}
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("compressed-tensors", "int4 32 sym", INT4),
        ("awq", "int4 32 asym", INT4_ZEROS),
        ("gptq", "int4 channel asym v2", INT4_ZEROS | {"group_size": "channel"}),
        ("compressed-tensors", "int8 channel sym", INT8),
        ("compressed-tensors", "int8 32 asym", INT8 | {"group_size": 32, "symmetric": False}),
        ("compressed-tensors", "int4 32 sym, some int8, some dense", INT4 | {"overrides": overrides}),
    ]
    for form, label, options in kinds:
        tolerance = OF_HALF_SCALES if form == "compressed-tensors" else OF_EXACT_SERVERS
        yield Case(form, label, OPENVINO, ({"rtn": options},), tolerance)
    for family in ("llama", "qwen2", "qwen3"):
        passes = ({"rtn": INT4_ZEROS},)
        yield Case("awq", f"int4 32 asym, {family}", OPENVINO, passes, OF_EXACT_SERVERS, family=family)
    yield Case("dense", "2:4", OPENVINO, ({"magnitude": {"pattern": "2:4"}},), OF_EXACT_SERVERS)
    yield Case("gptq", "int3 32 sym v1", OPENVINO, ({"rtn": INT4 | {"weights": "int3"}},), refused="not int3")


def _vllm() -> Iterator[Case]:
    """Every scheme that vLLM runs on a CPU, of every structure; and what it refuses there."""
    kinds: list[tuple[str, str, dict[str, Any], float]] = [
        ("compressed-tensors", "int4 32 sym", INT4, OF_SERVERS),
        ("compressed-tensors", "int4 32 asym", INT4_ZEROS, OF_SERVERS),
        ("compressed-tensors", "int8 channel sym, int8 inputs token", INT8 | {"activations": "int8"}, OF_INPUTS),
        ("compressed-tensors", "fp8 channel, fp8 inputs token", FP8, OF_INPUTS),
        ("gptq", "int4 32 sym v1", INT4, OF_SERVERS),
        ("awq", "int4 32 sym", INT4, OF_SERVERS),
        ("awq", "int4 32 asym", INT4_ZEROS, OF_SERVERS),
    ]
    pruned = ({"magnitude": {"pattern": "2:4"}},)
    for family in (None, *SERVED):
        if family in MIXTURES:
            continue
        end = "" if family is None else f", {family}"
        for form, label, options, limit in kinds:
            dtype = "float32" if "fp8" in label else None
            yield Case(form, label + end, VLLM, ({"rtn": options},), limit, family=family, dtype=dtype)
        yield Case("dense", f"2:4{end}", VLLM, pruned, OF_SERVERS, family=family)
    for (
        family
    ) in MIXTURES:  # in float32 where a kernel has it: in 16 bits the order of sums decides between two experts
        yield Case("dense", f"2:4, {family}", VLLM, pruned, OF_SERVERS, family=family, dtype="float32")
        for form, label, options, limit in kinds:
            dtype = "float32" if "inputs" in label else None
            passes, text = ({"rtn": options | NO_EXPERTS},), f"{label}, experts dense, {family}"
            limit = OF_ROUTERS if "int8" in label else limit
            yield Case(form, text, VLLM, passes, limit, family=family, dtype=dtype)
    for form, label, options, _ in kinds:
        words = "Unsupported FP8 MoE backend" if "fp8" in label else "MoE backend supports the deployment"
        yield Case(form, f"{label}, qwen2_moe", VLLM, ({"rtn": options},), family="qwen2_moe", refused=words)
    refusals: list[tuple[str, str, dict[str, Any], str]] = [
        ("compressed-tensors", "int8 channel sym", INT8, "Failed to find a kernel"),
        ("gptq", "int8 channel sym v1", INT8, "does not support weight_bits"),
        ("gptq", "int3 32 sym v1", {"weights": "int3", "group_size": 32}, "Unsupported quantization config"),
        ("gptq", "int4 32 asym v2", INT4_ZEROS, "Unsupported quantization config"),
        ("bitsandbytes", "nf4 32", {"weights": "nf4", "group_size": 32}, "bitsandbytes"),
        ("mlx", "uint4 32", {"weights": "uint4", "group_size": 32}, "mlx"),
        ("native", "int4 32 sym", INT4, "compress"),
    ]
    for form, label, options, words in refusals:
        yield Case(form, label, VLLM, ({"rtn": options},), refused=words)
    yield from _vllm_floats()


def _vllm_floats() -> Iterator[Case]:
    """Static scales, blocks, block floats and format modelopt, for most of which vLLM has kernels of GPUs alone."""
    nvfp4, block = {"weights": "nvfp4"}, {"weights": "fp8_e4m3", "group_size": 128, "block_rows": 128}
    nvfp4_inputs = nvfp4 | {"activations": "nvfp4", "activation_scale": "static"}
    mxfp4_inputs = {"weights": "mxfp4", "activations": "mxfp4"}
    mxfp8_inputs = {"weights": "mxfp8", "activations": "mxfp8"}
    fp8_static = FP8 | {"group_size": "tensor", "activation_scale": "static"}
    int8_static = INT8 | {"activations": "int8", "activation_scale": "static"}
    static, amx = "static_scaled_fp8_quant", "CPUFp8W8A8BlockScaledMMKernel requires AMX tile support"
    shard = "is not divisible by weight quantization block_n"  # the rows of a key projection
    marlin, no_kernel = "Marlin FP4 not available", "Failed to find a kernel that can implement the"
    kinds: list[tuple[str, str, dict[str, Any], str | None]] = [
        ("compressed-tensors", "int8 channel sym, int8 inputs static", int8_static, None),
        ("compressed-tensors", "fp8 tensor, fp8 inputs static", fp8_static, static),
        ("compressed-tensors", "fp8 128x128 blocks", block, shard),
        ("compressed-tensors", "nvfp4", nvfp4, marlin),
        ("compressed-tensors", "nvfp4 with nvfp4 inputs", nvfp4_inputs, f"{no_kernel} NVFP4 linear layer"),
        ("compressed-tensors", "mxfp4", {"weights": "mxfp4"}, f"{no_kernel} MXFP4 linear layer"),
        ("compressed-tensors", "mxfp4 with mxfp4 inputs", mxfp4_inputs, f"{no_kernel} MXFP4 linear layer"),
        ("compressed-tensors", "mxfp8", {"weights": "mxfp8"}, f"{no_kernel} MXFP8 linear layer"),
        ("compressed-tensors", "mxfp8 with mxfp8 inputs", mxfp8_inputs, f"{no_kernel} MXFP8 linear layer"),
        (
            "compressed-tensors",
            "int4 128 sym, fp8 inputs token",
            {"weights": "int4", "group_size": 128, "activations": "fp8_e4m3"},
            "No compressed-tensors compatible scheme was found",
        ),
        ("modelopt", "fp8 channel, fp8 inputs token", FP8, None),
        ("modelopt", "fp8 tensor, fp8 inputs static", fp8_static, static),
        ("modelopt", "fp8 128x128 blocks", block, amx),
        ("modelopt", "nvfp4", nvfp4, marlin),
        ("modelopt", "nvfp4 with nvfp4 inputs", nvfp4_inputs, f"{no_kernel} NVFP4 linear layer"),
        ("modelopt", "mxfp8 with mxfp8 inputs", mxfp8_inputs, f"{no_kernel} MXFP8 linear layer"),
    ]
    for form, label, options, words in kinds:
        dtype = "bfloat16" if "mxfp8" in label else "float16"  # modelopt refuses float32
        dtype = dtype if form == "modelopt" else "float32"
        passes, text = ({"rtn": options},), f"{label}, llama"
        limit = OF_FP8_INPUTS if form == "modelopt" else OF_INPUTS
        yield Case(form, text, VLLM, passes, limit, family="llama", refused=words, dtype=dtype)


def _of_others() -> Iterator[Case]:
    """What the scripts of `writers/` write; a label is a kind that the script knows."""
    for kind in (
        "int4-32-sym",
        "int4-32-asym",
        "int8-32-sym",
        "int4-channel-asym",
        "gptq-int4-32-sym",
        "NVFP4A16",
        "MXFP4A16",
    ):
        limit = OF_BFLOAT16 if "FP4" in kind else None
        wide = kind in ("int4-32-asym", "gptq-int4-32-sym")
        yield Case("compressed-tensors", kind, COMPRESSED_TENSORS, (), limit, "llmcompressor", wide)
    for kind in ("W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4", "MXFP8", "NVFP4"):
        limit = OF_FOUR_BIT_INPUTS if kind == "NVFP4" else OF_INPUTS
        yield Case("compressed-tensors", kind, COMPRESSED_TENSORS, (), limit, "llmcompressor")
    for kind in (
        "int4-32-sym-plain",
        "int4-32-sym-desc",
        "int4-32-asym-plain",
        "int8-32-sym-plain",
        "int3-32-sym-plain",
        "int2-32-asym-desc",
        "int4-32-sym-dynamic",
        "int4-32-asym-v1",
    ):
        yield Case("gptq", kind, GPTQMODEL, (), None, "gptqmodel", kind == "int4-32-sym-desc")
    yield Case("awq", "int4-32-asym", AUTOAWQ, (), None, "autoawq")
    yield Case("gptq", "int4-32-sym-gptq", GPTQMODEL, (), None, "autoround", True)
    yield Case("awq", "int4-32-asym-awq", GPTQMODEL, (), None, "autoround")
    yield Case("compressed-tensors", "int4-32-sym-llmcompressor", COMPRESSED_TENSORS, (), None, "autoround")
    for kind in ("nf4", "fp4", "nf4-dq", "fp4-dq"):
        yield Case("bitsandbytes", kind, BITSANDBYTES, (), None, "bitsandbytes", kind == "nf4-dq")
    yield Case("bitsandbytes", "int8", BITSANDBYTES, (), OF_INPUTS, "bitsandbytes")


def _kind(symmetric: bool) -> str:
    return "sym" if symmetric else "asym"
