"""Tensors of parts that the model's class does not have, such as layers that predict several tokens, are copied."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import compress
from compress import RTN, DropBlocks
from compress.checkpoint.formats import FORMATS

EXTRA = {
    "mtp.layers.0.mlp.up_proj.weight": torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "mtp.norm.weight": torch.ones(4),
    "mtp.layers.0.mlp.gate.e_score_correction_bias": torch.arange(4),
}
PASSES = {
    "gptq": RTN(group_size=32),
    "awq": RTN(group_size=32),
    "dense": compress.Wanda(),
    "bitsandbytes": RTN(weights="nf4"),
    "modelopt": RTN(weights="fp8_e4m3", group_size="channel", activations="fp8_e4m3"),
}


@pytest.fixture(scope="module")
def source(pico, tmp_path_factory):
    """A folder of the pico model with further tensors."""
    folder = tmp_path_factory.mktemp("source") / "model"
    shutil.copytree(pico, folder)
    save_file(load_file(folder / "model.safetensors") | EXTRA, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def tensors_in(folder):
    return {name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in load_file(path).items()}


def has_copies(folder):
    """Whether a checkpoint holds the further tensors bit for bit."""
    stored = tensors_in(folder)
    return all(
        name in stored and torch.equal(stored[name], t) and stored[name].dtype == t.dtype for name, t in EXTRA.items()
    )


@pytest.mark.parametrize("format_", [name for name, form in FORMATS.items() if form.file is None])
def test_a_run_copies_them_and_names_them(format_, source, recipe, tmp_path):
    asked = recipe(PASSES.get(format_, RTN(group_size=32)), model=source, eval=None, save={"format": format_})
    planned = compress.plan(asked)
    assert any("3 tensors that LlamaForCausalLM has no parts for are copied unchanged" in n for n in planned.notes)
    result = compress.run(asked, tmp_path / "out")
    assert has_copies(tmp_path / "out") and "mtp.norm.weight" in (tmp_path / "out" / "report.md").read_text()
    assert result.report["size"]["checkpoint_bytes"] >= planned.checkpoint_bytes
    compress.save(compress.load(tmp_path / "out")[0], tmp_path / "again", "native")
    assert has_copies(tmp_path / "again")


def test_a_server_reads_them_dense(source, recipe, tmp_path):
    compress.run(recipe(RTN(group_size=32), model=source, eval=None), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "mtp.layers.0.mlp.up_proj" in config["ignore"]


def test_a_resumed_run_has_the_same_bytes(source, recipe, stop, tmp_path):
    asked = recipe(RTN(group_size=32), model=source, eval=None)
    whole = compress.run(asked, tmp_path / "whole").report["checkpoint_sha256"]
    stop(asked, tmp_path / "killed")
    assert compress.run(asked, tmp_path / "killed").report["checkpoint_sha256"] == whole


@pytest.mark.parametrize(
    ("step", "save", "reason"),
    [
        (RTN(weights="int8", group_size=32), {"format": "gguf"}, "left out, because format gguf has no names for them"),
        (DropBlocks(count=1), {"format": "dense"}, "left out, because a pass changes the shape of the model"),
    ],
)
def test_what_cannot_hold_them_says_so(step, save, reason, source, recipe, tmp_path):
    asked = recipe(step, model=source, eval=None, save=save)
    assert any(reason in note for note in compress.plan(asked).notes)
    compress.run(asked, tmp_path / "out")
    assert not set(EXTRA) & set(tensors_in(tmp_path / "out"))
