"""A model with its own code in its folder, as models of the hub have it that need trust_remote_code."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

CONFIGURATION = """from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own-llama"
"""
MODEL = """from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig
from .scaling_own import SCALE


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits * SCALE
        return output
"""
AUTO_MAP = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def write_own_code(folder: Path, pico: str) -> str:
    """Write a model whose code is in three files, with pico's weights and other side files; return its folder."""
    folder.mkdir()
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODEL)
    (folder / "scaling_own.py").write_text("SCALE = 0.5\n")
    model = LlamaForCausalLM.from_pretrained(pico)
    config = {**LlamaConfig.from_pretrained(pico).to_dict(), "model_type": "own-llama", "auto_map": AUTO_MAP}
    config["architectures"] = ["OwnForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"},
        folder / "model.safetensors",
    )
    AutoTokenizer.from_pretrained(pico).save_pretrained(folder)
    return str(folder)
