"""Folders that hold more, or something else, than config.json says: the message says what lies there."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from click.testing import CliRunner
from tolerances import same_logits
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress.checkpoint.inspection import inspect
from compress.checkpoint.opening import open_model
from compress.cli import main
from compress.errors import CalibrationError, ModelError

IDS = torch.arange(5, 29)[None]
CONFIGS = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True},
            }
        },
    },
}


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def dense(pico, tmp_path):
    shutil.copytree(pico, tmp_path / "dense")
    return tmp_path / "dense"


@pytest.mark.parametrize("form", CONFIGS)
def test_a_quantization_config_that_was_left_in_a_dense_folder(form, dense):
    change(dense, quantization_config=CONFIGS[form])
    with pytest.raises(ModelError, match="its weight is stored dense .*remove quantization_config from config.json"):
        compress.load(dense)


def test_a_folder_of_autogptq_states_its_quantization_in_another_file(pico, tmp_path):
    model = compress.apply(AutoModelForCausalLM.from_pretrained(pico), [compress.RTN(weights="int4", group_size=32)])
    folder = compress.save(model, tmp_path / "gptq", "gptq", AutoTokenizer.from_pretrained(pico))
    expected = compress.load(folder)[0](IDS).logits
    values = json.loads((folder / "config.json").read_text())
    stated = values.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "SHA256SUMS").unlink()
    keys = {"bits", "group_size", "damp_percent", "desc_act", "static_groups", "sym", "true_sequential"}
    old = {key: value for key, value in stated.items() if key in keys}
    old |= {"damp_percent": 0.01, "static_groups": False, "true_sequential": True, "model_name_or_path": None}
    (folder / "quantize_config.json").write_text(json.dumps(old | {"model_file_base_name": "gptq_model-4bit-32g"}))
    assert same_logits(compress.load(folder)[0](IDS).logits, expected)
    assert "gptq" in CliRunner().invoke(main, ["inspect", str(folder)]).output
    (folder / "quantize_config.json").write_text("{")
    with pytest.raises(ModelError, match="quantize_config.json cannot be read"):
        compress.load(folder)


def test_a_gguf_file_beside_safetensors_is_not_chosen_silently(dense):
    (dense / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="holds model.gguf and safetensors files"):
        compress.load(dense)


def test_an_adapter_beside_the_weights_is_named(dense, recipe, caplog):
    """By whatever opens the folder."""
    (dense / "adapter_config.json").write_text("{}")
    note = "the LoRA adapter in the folder is not read; merge it into the model first"
    assert any(note in text for text in compress.plan(recipe(compress.RTN(), model=str(dense))).notes)
    assert any(note in text for text in inspect(dense).notes)
    assert not [record for record in caplog.records if note in record.getMessage()]
    compress.load(dense)
    [warning] = [record for record in caplog.records if note in record.getMessage()]
    assert warning.levelname == "WARNING" and str(dense) in warning.getMessage()


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 2446000\n"


@pytest.mark.parametrize("opened_by", [compress.load, lambda path: open_model(str(path)), inspect])
@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_clone_without_git_lfs_is_named(file, opened_by, dense):
    (dense / file).write_text(POINTER)
    message = rf"{file} is a pointer of Git LFS, not the file itself; fetch the file with: git lfs pull"
    with pytest.raises(ModelError, match=message):
        opened_by(dense)


@pytest.mark.parametrize("file", ["a.gguf", "a-00001-of-00002.gguf", "a.safetensors"])
def test_a_pointer_of_git_lfs_in_the_place_of_one_file_is_named(file, tmp_path):
    for name in (file, file.replace("-00001-", "-00002-")):
        (tmp_path / name).write_text(POINTER)
    opened_by = [inspect] if file == "a.safetensors" else [inspect, compress.load, lambda path: open_model(str(path))]
    for use in opened_by:
        with pytest.raises(ModelError, match=rf"{file} is a pointer of Git LFS, not the file itself"):
            use(tmp_path / file)


def test_half_a_character_in_a_text_is_an_error_that_names_its_line(recipe, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "whole"}\n{"text": "a \\ud800 b"}\n')
    asked = recipe(compress.GPTQ(), calibration={"source": str(path), "sequences": 1, "length": 4, "divided": False})
    with pytest.raises(
        CalibrationError, match=r"texts.jsonl:2: its text holds \\ud800, half of a character, at position 2"
    ):
        compress.run(asked, tmp_path / "out", progress=False)


def with_tokenizer(pico, folder, config, **files):
    """Copy the pico model without its tokenizer.json, with other files of a tokenizer."""
    shutil.copytree(pico, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="the package is installed")
def test_a_sentencepiece_file_names_its_package(pico, tmp_path):
    folder = with_tokenizer(pico, tmp_path / "a", {"tokenizer_class": "LlamaTokenizer"}, tokenizer__model="\n")
    with pytest.raises(ModelError, match=r"tokenizer\.model is a file of SentencePiece.*: pip install sentencepiece"):
        compress.load(folder)


@pytest.mark.parametrize("stated", [["tokenization_x.X", None], "tokenization_x.X"], ids=["list", "text"])
def test_a_tokenizer_of_its_own_code_says_how_to_run_it(stated, pico, tmp_path):
    code = "from transformers import PreTrainedTokenizer\nclass X(PreTrainedTokenizer):\n    pass\n"
    config = {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": stated}}
    folder = with_tokenizer(pico, tmp_path / "a", config, tokenization_x__py=code)
    with pytest.raises(ModelError, match=r"code in the folder \(tokenization_x\.X\).*trust_remote_code: true"):
        compress.load(folder)
