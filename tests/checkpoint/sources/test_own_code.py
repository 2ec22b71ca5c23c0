"""Models with their own code, and the files beside the weights that a checkpoint keeps."""

import json
import subprocess
import sys

import pytest
import torch
from own_code import write_own_code
from transformers import AutoModelForCausalLM

import compress
from compress.checkpoint.sources.files import read_side_files
from compress.errors import ModelError

IDS = torch.arange(5, 29)[None]


@pytest.fixture
def own(tmp_path, pico):
    return write_own_code(tmp_path / "own", pico)


@pytest.mark.parametrize("form", ["compressed-tensors", "native", "dense"])
def test_a_model_with_its_own_code_is_compressed_and_loads_again(form, own, recipe, pico, tmp_path):
    step = compress.RTN(weights="int8", group_size=32)
    asked = recipe(step, model=own, trust_remote_code=True, save={"format": form})
    report = compress.run(asked, tmp_path / "out", progress=False).report
    assert report["verified"]["own"] < 1e-3
    names = {"configuration_own.py", "modeling_own.py", "scaling_own.py"}
    assert names <= set(report["files"])  # and their digests
    model, _ = compress.load(tmp_path / "out", trust_remote_code=True)
    plain, _ = compress.load(pico)
    with torch.no_grad():
        assert torch.allclose(model(IDS).logits, plain(IDS).logits / 2, atol=0.1)
    with pytest.raises(ModelError, match="trust_remote_code: true"):
        compress.load(tmp_path / "out")
    if form == "dense":
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
        with torch.no_grad():
            assert torch.allclose(theirs(IDS).logits, model(IDS).logits, atol=1e-4)


def test_code_runs_only_if_the_user_trusts_it(own, recipe, tmp_path):
    (tmp_path / "own" / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise ValueError('no')\n")
    (tmp_path / "own" / "configuration_own.py").write_text((tmp_path / "own" / "modeling_own.py").read_text())
    with pytest.raises(ModelError, match="trust_remote_code"):
        compress.plan(recipe(compress.RTN(), model=own))
    code = f"import compress.errors\ntry:\n    compress.load({own!r})\nexcept compress.errors.ModelError:\n    pass\n"
    subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL)  # nobody is asked, either
    assert not (tmp_path / "ran").exists()


def test_code_that_cannot_be_run_is_an_error_that_names_it(own, recipe, tmp_path):
    (tmp_path / "own" / "modeling_own.py").write_text("raise ValueError('an old version')\n")
    with pytest.raises(ModelError, match="modeling_own.OwnForCausalLM cannot be run .*an old version"):
        compress.plan(recipe(compress.RTN(), model=own, trust_remote_code=True))


def test_every_side_file_is_kept(pico, recipe, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        (folder / name).write_bytes((tmp_path.__class__(pico) / name).read_bytes())
    kept = {
        "chat_template.json": json.dumps({"chat_template": "{{ messages }}"}),
        "preprocessor_config.json": "{}",
        "LICENSE": "Apache",
        "NOTICE.txt": "of others",
        "tekken.json": "{}",
        "labels.txt": "a\nb\n",
    }
    dropped = {
        "quantize_config.json": "{}",
        "model.safetensors.index.json": "{}",
        "code.py": "",
        "weights.bin": "",
    }
    for name, text in (kept | dropped).items():
        (folder / name).write_text(text)
    (tmp_path / "elsewhere.json").write_text("{}")
    (folder / "link.json").symlink_to(tmp_path / "elsewhere.json")
    assert read_side_files(folder, trust_remote_code=False) == kept
    assert "code.py" in read_side_files(folder, trust_remote_code=True)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "link.json").unlink()
    compress.run(recipe(compress.RTN(), model=str(folder)), tmp_path / "out", progress=False)
    assert {name: (tmp_path / "out" / name).read_text() for name in kept} == kept
    assert not {path.name for path in (tmp_path / "out").iterdir()} & (
        {*dropped, "link.json"} - {"model.safetensors.index.json"}
    )
    (folder / "extra.json").write_text("{")
    with pytest.raises(ModelError, match="extra.json cannot be read"):
        read_side_files(folder, trust_remote_code=False)
