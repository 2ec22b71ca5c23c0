"""Folders of tiny models that are quantized already, in the layouts of other programs, written with numpy and torch.

Each function writes a folder and returns the dense weights that its layout states, by the names of the stored layers.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

PICO = Path(__file__).parent / "pico" / "model"
VOCABULARY = 1024
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": torch.bfloat16,
    "tie_word_embeddings": False,
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


def llama() -> PreTrainedModel:
    """A dense Llama."""
    return _made(LlamaForCausalLM(LlamaConfig(**COMMON, intermediate_size=256)))


def qwen3() -> PreTrainedModel:
    """A dense Qwen3; its intermediate size is no multiple of 128."""
    return _made(Qwen3ForCausalLM(Qwen3Config(**COMMON, intermediate_size=320, head_dim=64)))


def qwen3_moe() -> PreTrainedModel:
    """A mixture of experts whose experts are stored one by one."""
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    return _made(Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **sizes, head_dim=64)))


def minimax() -> PreTrainedModel:
    """A MiniMax-M2, whose modules have other names in its files than in transformers."""
    sizes = {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}
    return _made(MiniMaxM2ForCausalLM(MiniMaxM2Config(**COMMON, **sizes)))


def deepseek(predicts: int = 0) -> PreTrainedModel:
    """A DeepSeek-V3 with a dense block and one of experts."""
    sizes: dict[str, Any] = {"intermediate_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 4}
    sizes |= {
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    }
    sizes |= {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32}
    sizes |= {"v_head_dim": 64, "num_nextn_predict_layers": predicts}
    return _made(DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON, **sizes)))


def gpt_oss() -> PreTrainedModel:
    """A dense GPT-OSS; its experts are stored together."""
    sizes = {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}
    return _made(GptOssForCausalLM(GptOssConfig(**COMMON, **sizes)))


def _made(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data = (torch.randn(parameter.shape) * 0.1).to(torch.bfloat16)
        elif name.endswith("bias"):
            parameter.data = (torch.randn(parameter.shape) * 0.1).to(parameter.dtype)
    return model.to(torch.bfloat16).eval()


def dense_tensors(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Save a dense model with its tokenizer; returns its tensors by the names of its files."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(PICO).save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def write(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None) -> None:
    """Write tensors and a `quantization_config` to the folder of a dense model."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a stored tensor is the weight of a linear that these programs quantize."""
    outside = ("embed_tokens", "lm_head", "norm", ".gate.weight", "router")
    return tensor.ndim == 2 and name.endswith(".weight") and not any(part in name for part in outside)


def fp8_blocks(weight: Tensor, block: tuple[int, int], exponents: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, dense weight) of blocks; the scale of a block is its largest magnitude over 448."""
    (rows, width), (high, wide) = weight.shape, block
    scales = torch.zeros(-(-rows // high), -(-width // wide))
    codes, dense = torch.zeros(rows, width, dtype=torch.float8_e4m3fn), torch.zeros(rows, width)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            values = weight[part].float()
            scale = values.abs().max() / 448
            scale = torch.exp2(torch.ceil(torch.log2(scale))) if exponents else scale
            scales[i, j] = scale
            codes[part] = (values / scale).to(torch.float8_e4m3fn)
            dense[part] = codes[part].float() * scale
    return codes, scales, dense


def fp8(
    model: PreTrainedModel,
    folder: Path,
    block: tuple[int, int] | None = (128, 128),
    scale_dtype: torch.dtype = torch.float32,
    **config: Any,
) -> dict[str, Tensor]:
    """Write `quant_method: fp8`; block None: one scale for a weight, and static scales of the inputs."""
    tensors, dense = dense_tensors(model, folder), {}
    for name, weight in list(tensors.items()):
        if not is_linear(name, weight):
            continue
        exact = scale_dtype is not torch.float32
        codes, scales, values = fp8_blocks(weight, block or tuple(weight.shape), exact)
        tensors[name] = codes
        stored = (torch.log2(scales) + 127).to(torch.uint8) if scale_dtype is torch.uint8 else scales.to(scale_dtype)
        tensors[f"{name}_scale_inv"] = stored.reshape(()) if block is None else stored
        dense[name] = values
        if block is None:
            tensors[f"{name.removesuffix('.weight')}.activation_scale"] = torch.tensor(0.05)
    scheme = "dynamic" if block else "static"
    stated = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": block and list(block)}
    write(folder, tensors, {**stated, "fmt": "e4m3", "modules_to_not_convert": ["lm_head"], **config})
    return dense


def modelopt_fp8(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Write FP8 of Model Optimizer, described in hf_quant_config.json, with scales of a KV cache."""
    tensors, dense = dense_tensors(model, folder), {}
    for name, weight in list(tensors.items()):
        if is_linear(name, weight):
            owner, codes, scales, values = name.removesuffix(".weight"), *fp8_blocks(weight, tuple(weight.shape))
            tensors[name], dense[name] = codes, values
            tensors[f"{owner}.weight_scale"] = scales.reshape(())
            tensors[f"{owner}.input_scale"] = torch.tensor(0.05)
            if owner.endswith(("k_proj", "v_proj")):
                tensors[f"{owner}.{owner[-6]}_scale"] = torch.tensor(0.02)
    write(folder, tensors, None)
    stated = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    text = json.dumps({"producer": {"name": "modelopt", "version": "0.37.0"}, "quantization": stated})
    (folder / "hf_quant_config.json").write_text(text)
    return dense


def e2m1(values: np.ndarray) -> np.ndarray:
    """The code of the nearest value of E2M1 for each number."""
    index = np.abs(np.abs(values)[..., None] - E2M1).argmin(-1)
    return (index + 8 * (values < 0)).astype(np.uint8)


def decoded(codes: np.ndarray) -> np.ndarray:
    """The values of codes of E2M1."""
    return E2M1[codes & 7] * np.where(codes & 8, -1, 1).astype(np.float32)


def pairs(codes: np.ndarray) -> Tensor:
    """Two codes per byte, the even one in the low half."""
    return torch.from_numpy(codes[..., 0::2] | (codes[..., 1::2] << 4))


def modelopt_nvfp4(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Write NVFP4 of Model Optimizer, described in config.json."""
    tensors, dense = dense_tensors(model, folder), {}
    for name, weight in list(tensors.items()):
        if not is_linear(name, weight):
            continue
        owner, values = name.removesuffix(".weight"), weight.float().numpy()
        groups = values.reshape(len(values), -1, 16)
        common = np.float32(np.abs(values).max() / (6 * 448))
        scales = torch.from_numpy(np.abs(groups).max(-1) / 6 / common).to(torch.float8_e4m3fn)
        wide = scales.float().numpy()[..., None] * common
        codes = e2m1(np.divide(groups, wide, out=np.zeros_like(groups), where=wide != 0)).reshape(values.shape)
        tensors[name] = pairs(codes)
        tensors |= {f"{owner}.weight_scale": scales, f"{owner}.weight_scale_2": torch.tensor(common)}
        tensors[f"{owner}.input_scale"] = torch.tensor(0.01)
        dense[name] = torch.from_numpy((decoded(codes).reshape(groups.shape) * wide).reshape(values.shape))
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    groups = {"group_0": {"input_activations": weights, "weights": weights, "targets": ["Linear"]}}
    stated = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups, "ignore": ["lm_head"]}
    write(folder, tensors, {**stated, "producer": {"name": "modelopt"}})
    return dense


def mxfp4(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Write the experts of a GPT-OSS in MXFP4; some groups have small codes alone. Dense weights are [E, out, in]."""
    tensors, dense = dense_tensors(model, folder), {}
    draw = np.random.default_rng(0)
    for name, weight in list(tensors.items()):
        if weight.ndim != 3:
            continue
        count, inputs, outputs = weight.shape
        codes = draw.integers(0, 16, (count, outputs, inputs // 32, 32), dtype=np.uint8)
        codes[:, ::7] &= 9  # values up to 0.5: no rounding finds their scale again
        exponents = draw.integers(119, 123, codes.shape[:3], dtype=np.uint8)
        del tensors[name]
        tensors |= {f"{name}_blocks": pairs(codes), f"{name}_scales": torch.from_numpy(exponents)}
        values = decoded(codes) * np.exp2(exponents.astype(np.float32) - 127)[..., None]
        dense[name] = torch.from_numpy(values.reshape(count, outputs, inputs))
    write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    return dense


def maker(cases, tmp_path_factory):
    """made(case) -> (folder, what its function in `cases` returns); each is made once."""

    @cache
    def made(case):
        folder = tmp_path_factory.mktemp("made") / "model"
        return folder, cases[case](folder)

    return made
