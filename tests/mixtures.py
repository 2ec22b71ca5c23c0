"""A mixture of experts with the weights of the pico model: each expert is its feed-forward layer with other noise."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

PICO = Path(__file__).parent / "pico" / "model"
EXPERTS, PER_TOKEN = 4, 2
NOISE = 0.3  # of the standard deviation of a weight: experts differ, and the model predicts the text as before


def upcycled(dense: LlamaForCausalLM, experts: int = EXPERTS, noise: float = NOISE) -> MixtralForCausalLM:
    """A mixture of experts from a Llama model; the same at every call, and the global random state stays."""
    options = {
        key: value for key, value in dense.config.to_dict().items() if key not in ("architectures", "model_type")
    }
    config = MixtralConfig(**options, num_local_experts=experts, num_experts_per_tok=PER_TOKEN)
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        mixture = MixtralForCausalLM(config).eval().requires_grad_(False)
    state = dense.state_dict()
    for name, tensor in mixture.state_dict().items():
        if name in state:
            tensor.copy_(state[name])
            continue
        layer, _, inner = name.partition(".mlp.")
        if inner == "gate.weight":
            tensor.copy_(torch.randn(tensor.shape, generator=draw) * tensor.shape[1] ** -0.5)
            continue
        parts = ("gate_proj", "up_proj") if inner == "experts.gate_up_proj" else ("down_proj",)
        weight = torch.cat([state[f"{layer}.mlp.{part}.weight"] for part in parts])
        tensor.copy_(weight + noise * weight.std() * torch.randn(tensor.shape, generator=draw))
    return mixture


def pico_mixture() -> MixtralForCausalLM:
    """A fresh copy of the mixture of the pico model, in memory."""
    return upcycled(AutoModelForCausalLM.from_pretrained(PICO))


@cache
def mixture_folder() -> str:
    """A folder with the mixture of the pico model and its tokenizer, until the process ends; it must not be changed."""
    folder = TemporaryDirectory(prefix="pico-mixture-")
    atexit.register(folder.cleanup)
    pico_mixture().save_pretrained(folder.name)
    AutoTokenizer.from_pretrained(PICO).save_pretrained(folder.name)
    return folder.name
