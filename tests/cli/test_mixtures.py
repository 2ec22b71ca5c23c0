"""One-line schemes on mixtures of experts: the commands end well, and plan and report say what was not verified."""

import json

import pytest
import torch
from click.testing import CliRunner
from model_families import FAMILIES as FAMILIES_OF_ALL
from model_families import experts, grouped
from transformers import AutoConfig, AutoModelForCausalLM

from compress import cli

SCHEMES = ["FP8-dynamic", "W8A8", "NVFP4", "NVFP4A16", "MXFP4", "W4A16-asym"]
FAMILIES = ["mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3", "gpt-oss"]
WIDTHS = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}
"""Multiples of the groups of all schemes."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """mixture(family) -> a folder with a tiny model."""
    made = {}

    def folder(family):
        if family not in made:
            kind, options = FAMILIES_OF_ALL.get(family, ("qwen2_moe", {**grouped, **experts}))
            options = {**options, **WIDTHS, "shared_expert_intermediate_size": 64}
            latent = {"v_head_dim": 16, "q_lora_rank": 64, "kv_lora_rank": 64}
            options |= latent if family == "deepseek-v3" else {"head_dim": 16}
            torch.manual_seed(0)
            made[family] = tmp_path_factory.mktemp(family)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).save_pretrained(made[family])
        return str(made[family])

    return folder


@pytest.mark.few(3, slow=9)
@pytest.mark.parametrize(("scheme", "family"), [(scheme, family) for family in FAMILIES for scheme in SCHEMES])
def test_a_scheme_on_a_mixture_needs_no_option(scheme, family, mixture, texts, tmp_path):
    text = ["--calibration", texts["tiny"], "--eval", texts["tiny test"]]
    command = ["quantize", mixture(family), "--scheme", scheme, *text, "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.main, command)
    assert result.exit_code == 0, result.output
    verified = json.loads((tmp_path / "out" / "report.json").read_text())["verified"]
    assert verified["own"] < 1e-3
    assert (verified["transformers"] is None) == (verified["skipped"] is not None)
