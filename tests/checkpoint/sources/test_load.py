"""compress.load reads what was written, keeps packed weights packed, and says what it cannot read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerances import near
from transformers import AutoModelForCausalLM

import compress
from compress.errors import ModelError
from compress.layers.linear import CompressedLinear


@pytest.fixture(scope="module")
def packed(recipe, tmp_path_factory):
    """A run that leaves attention in W8A8 and the rest dense."""
    step = compress.RTN(targets="*.self_attn.*", weights="int8", group_size="channel", activations="int8")
    return compress.run(recipe(step), tmp_path_factory.mktemp("packed") / "out").folder


@pytest.fixture
def folder(packed, tmp_path):
    """A copy of it that may be damaged."""
    return Path(shutil.copytree(packed, tmp_path / "model"))


def test_packed_weights_stay_packed_and_nothing_is_kept_twice(packed):
    model, tokenizer = compress.load(packed)
    layers = [m for m in model.modules() if isinstance(m, CompressedLinear)]
    assert len(layers) == 12 and tokenizer is not None
    for layer in layers:
        assert layer.codes is not None and layer.rounding.grid.name == "int8"
        assert set(layer.state_dict()) == {"parts.0.words", "parts.0.scale"}
    assert not any(t.is_meta for t in model.state_dict().values())
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_the_dtype_can_be_chosen_and_codes_stay(packed):
    exact, _ = compress.load(packed)
    half, _ = compress.load(packed, dtype="bfloat16")
    name = "model.layers.0.self_attn.q_proj"
    assert exact.get_submodule(name).codes.sha256() == half.get_submodule(name).codes.sha256()
    assert half.model.norm.weight.dtype == torch.bfloat16
    with torch.no_grad():
        logits = half(input_ids=torch.arange(8)[None]).logits
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(logits.float(), exact(input_ids=torch.arange(8)[None]).logits, atol=0.3, rtol=0)


def test_a_dense_folder_is_loaded_as_it_is(pico, pico_model):
    model, _ = compress.load(pico)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert near(model(input_ids=ids).logits, pico_model(input_ids=ids).logits)


def test_a_dense_folder_that_transformers_must_convert(tiny_folder, ids):
    model, _ = compress.load(tiny_folder("gpt-neox"))
    theirs = AutoModelForCausalLM.from_pretrained(tiny_folder("gpt-neox")).eval()
    with torch.no_grad():
        assert near(model(input_ids=ids()).logits, theirs(input_ids=ids()).logits)


def test_the_generation_config_comes_along(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    assert compress.load(folder)[0].generation_config.eos_token_id == [0, 5]


def test_no_such_folder(tmp_path):
    with pytest.raises(ModelError, match="model: no folder .*nothing"):
        compress.load(tmp_path / "nothing")


def test_another_method_of_quantization(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "eetq"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"is quantized by 'eetq', which compress does not read; start from its dense model"
    ):
        compress.load(folder)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (
            "model.layers.1.self_attn.q_proj.weight_scale",
            r"model\.layers\.1\.self_attn\.q_proj lacks its tensor weight_scale",
        ),
        ("model.layers.1.self_attn.q_proj.weight", r"model\.layers\.1\.self_attn\.q_proj lacks its tensor weight"),
        ("model.layers.1.mlp.up_proj.weight", "lacks tensors of its model; write it again"),
    ],
)
def test_a_tensor_that_is_missing(lost, message, folder):
    shard = folder / "model-00003-of-00004.safetensors"
    tensors = {name: t.clone() for name, t in load_file(shard).items() if name != lost}
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        compress.load(folder)


def test_a_shard_that_is_missing(folder):
    (folder / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00003-of-00004\.safetensors is missing, but the index lists it"):
        compress.load(folder)


def poisoned(folder, name):
    """Write NaN over the first number of a tensor."""
    for path in folder.glob("*.safetensors"):
        held = {key: tensor.clone() for key, tensor in load_file(path).items()}
        if name in held:
            held[name].view(-1)[0] = torch.nan
            save_file(held, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.0.self_attn.q_proj.weight_scale", "holds a number that is not finite"),
        ("model.layers.1.mlp.up_proj.weight", "holds 1 NaN or infinite weights"),
        ("model.norm.weight", "holds 1 NaN or infinite weights"),
    ],
)
def test_weights_and_scales_that_are_not_finite_are_named(folder, name, reason):
    poisoned(folder, name)
    with pytest.raises(ModelError, match=f"{name} {reason}"):
        compress.load(folder)
