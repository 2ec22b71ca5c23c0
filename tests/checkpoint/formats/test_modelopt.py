"""The format `modelopt`: its tensors by numpy, its configuration, and what is written reads back bit for bit."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from schemes import coded, rounding

import compress
from compress import GPTQ, RTN
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.formats.modelopt import ModelOpt
from compress.errors import TargetError
from compress.layers.linear import CompressedLinear

MODELOPT = FORMATS["modelopt"]
CALIBRATION = torch.arange(64).reshape(2, 32)
STEPS = {
    "FP8": RTN(weights="fp8_e4m3", group_size="tensor", activations="fp8_e4m3", activation_scale="static"),
    "FP8_PER_CHANNEL_PER_TOKEN": RTN(weights="fp8_e4m3", group_size="channel", activations="fp8_e4m3"),
    "fp8_pb_wo": RTN(weights="fp8_e4m3", group_size=128, block_rows=128),
    "MXFP8": RTN(weights="mxfp8", activations="mxfp8"),
    "NVFP4": RTN(weights="nvfp4", activations="nvfp4", activation_scale="static"),
    "W4A16_NVFP4": RTN(weights="nvfp4"),
}
FP8, BYTES, ONE = torch.float8_e4m3fn, torch.uint8, torch.float32
Q = "model.layers.0.self_attn.q_proj"
STORED = {  # of q_proj, [128, 128]
    "FP8": {"weight": (FP8, (128, 128)), "weight_scale": (ONE, ()), "input_scale": (ONE, ())},
    "FP8_PER_CHANNEL_PER_TOKEN": {"weight": (FP8, (128, 128)), "weight_scale": (ONE, (128,))},
    "fp8_pb_wo": {"weight": (FP8, (128, 128)), "weight_scale": (ONE, (1, 1, 1, 1))},
    "MXFP8": {"weight": (FP8, (128, 128)), "weight_scale": (BYTES, (128, 4))},
    "NVFP4": {
        "weight": (BYTES, (128, 64)),
        "weight_scale": (FP8, (128, 8)),
        "weight_scale_2": (ONE, ()),
        "input_scale": (ONE, ()),
    },
    "W4A16_NVFP4": {"weight": (BYTES, (128, 64)), "weight_scale": (FP8, (128, 8)), "weight_scale_2": (ONE, ())},
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


@pytest.fixture
def model(tiny):
    """A Llama whose linears have whole blocks of 128."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    return tiny("llama", hidden_size=128, intermediate_size=128, **heads)


def stored_in(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def bits_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def layers_of(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, CompressedLinear)}


def written(model, algorithm, folder):
    """Quantize the model, write it, and return the tensors of its folder."""
    compress.apply(model, [STEPS[algorithm]], calibration=CALIBRATION)
    compress.save(model, folder, "modelopt")
    return stored_in(folder)


def dequantized(tensors, name, algorithm):
    """The weight that the stored tensors state, by numpy."""
    weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    if "NVFP4" in algorithm:
        codes = np.stack([weight.numpy() & 15, weight.numpy() >> 4], -1).reshape(len(weight), -1)
        values = E2M1[codes & 7] * np.where(codes & 8, -1, 1)
        wide = np.repeat(scale.float().numpy(), 16, 1) * tensors[f"{name}.weight_scale_2"].numpy()
        return values * wide
    if algorithm == "MXFP8":
        return weight.float().numpy() * np.repeat(np.exp2(scale.numpy().astype(np.float32) - 127), 32, 1)
    return weight.float().numpy() * scale.reshape(-1, 1).numpy()


@pytest.mark.parametrize("algorithm", STEPS)
def test_the_tensors_are_those_of_model_optimizer(algorithm, model, tmp_path):
    tensors = written(model, algorithm, tmp_path / "out")
    found = {name.removeprefix(f"{Q}."): (t.dtype, tuple(t.shape)) for name, t in tensors.items() if f"{Q}." in name}
    assert found == STORED[algorithm]
    for name, layer in layers_of(compress.load(tmp_path / "out", "float32")[0]).items():
        weight = layer.weight_as(torch.float32).numpy()
        np.testing.assert_allclose(dequantized(tensors, name, algorithm), weight, rtol=1e-6)


@pytest.mark.parametrize("algorithm", STEPS)
def test_layers_read_back_bit_for_bit(algorithm, model, tmp_path):
    written(model, algorithm, tmp_path / "out")
    loaded, _ = compress.load(tmp_path / "out")
    compress.save(loaded, tmp_path / "again", "modelopt")
    first, second = (stored_in(tmp_path / name) for name in ("out", "again"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(bits_of(tensor), bits_of(second[name])), name
    ids = torch.arange(24)[None]
    with torch.no_grad():
        gap = (loaded(input_ids=ids).logits - model(input_ids=ids).logits).abs().max()
    limit = 2e-1 if STEPS[algorithm].activations != "none" else 2e-2  # global scales differ in the last place
    assert gap <= limit * model(input_ids=ids).logits.abs().max()


def test_both_configurations_state_the_scheme(model, tmp_path):
    written(model, "NVFP4", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    values = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    assert config["quant_method"] == "modelopt" and config["quant_algo"] == "NVFP4"
    assert config["config_groups"] == {
        "group_0": {"targets": ["Linear"], "weights": values, "input_activations": values}
    }
    stated = json.loads((tmp_path / "hf_quant_config.json").read_text())
    assert stated["producer"]["name"] == "compress"
    assert stated["quantization"] == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": config["ignore"],
    }
    assert "lm_head" in config["ignore"]
    assert "hf_quant_config.json" in (tmp_path / "SHA256SUMS").read_text()


def test_the_separate_file_alone_describes_the_checkpoint(model, tmp_path):
    """Older versions of Model Optimizer state nothing in config.json."""
    written(model, "NVFP4", tmp_path)
    expected = {name: layer.sha256() for name, layer in layers_of(compress.load(tmp_path)[0]).items()}
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    assert {name: layer.sha256() for name, layer in layers_of(compress.load(tmp_path)[0]).items()} == expected


def test_layers_of_several_schemes_are_listed(model, tmp_path):
    rows = {"weights": "fp8_e4m3", "group_size": "channel", "activations": "fp8_e4m3", "activation_scale": "token"}
    mixed = RTN(weights="nvfp4", activations="nvfp4", activation_scale="static", overrides={"*.down_proj": rows})
    compress.apply(model, [mixed], calibration=CALIBRATION)
    expected = {name: layer.scheme.text for name, layer in layers_of(model).items()}
    compress.save(model, tmp_path, "modelopt")
    stated = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert stated["quant_algo"] == "MIXED_PRECISION"
    assert stated["quantized_layers"][Q] == {"quant_algo": "NVFP4", "group_size": 16}
    assert stated["quantized_layers"]["model.layers.1.mlp.down_proj"] == {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    assert {name: layer.scheme.text for name, layer in layers_of(compress.load(tmp_path)[0]).items()} == expected


def test_nvfp4_of_compressed_tensors_keeps_its_codes(model, tmp_path):
    compress.apply(model, [STEPS["NVFP4"]], calibration=CALIBRATION)
    compress.save(model, tmp_path / "first", "compressed-tensors")
    compress.export(tmp_path / "first", tmp_path / "second", "modelopt")
    compress.export(tmp_path / "second", tmp_path / "third", "compressed-tensors")
    first, third = (stored_in(tmp_path / name) for name in ("first", "third"))
    assert first.keys() == third.keys()
    for name, tensor in first.items():
        if "global_scale" in name:
            torch.testing.assert_close(third[name], tensor, rtol=2**-22, atol=0)
        else:
            assert torch.equal(bits_of(third[name]), bits_of(tensor)), name


def test_every_stored_reciprocal_reads_back():
    """A global scale is adapted once: its reciprocal then has the same reciprocal."""
    mantissas = torch.arange(1 << 23, dtype=torch.int32)[:: 1 << 5]
    scales = (mantissas | (127 << 23)).view(torch.float32)  # all of one binade, from 1 to 2
    for scale in (scales, scales * 2**-30, scales * 2**30):
        adapted = scale.reciprocal().reciprocal()
        assert torch.equal(adapted.reciprocal().reciprocal(), adapted)
        assert float((adapted / scale - 1).abs().max()) <= 2**-22
    assert not torch.equal(scales.reciprocal().reciprocal(), scales)  # without it, some differ


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (coded("int4", 32), "format modelopt holds FP8"),
        (coded("fp8_e4m3", "channel"), "format modelopt holds FP8"),
        (coded("fp8_e4m3", "tensor", True, rounding("fp8_e4m3")), "format modelopt holds FP8"),
        (coded("mxfp8", 32), "format modelopt holds FP8"),
        (coded("mxfp4", 32), "format modelopt holds FP8"),
        (coded("nvfp4", 16, shape=(6, 24)), "do not divide the 24 inputs"),
        (coded("nvfp4", 16, True, rounding("nvfp4", scale="group", group=16)), "format modelopt holds FP8"),
    ],
)
def test_other_schemes_are_refused(scheme, words):
    assert words in MODELOPT.refuses(scheme)


def test_a_plan_names_what_the_format_holds(recipe):
    with pytest.raises(TargetError, match="format modelopt holds FP8"):
        compress.plan(recipe(RTN(group_size=32), save={"format": "modelopt"}))


def test_a_run_is_verified_and_its_card_claims_no_program(recipe, tmp_path):
    step = GPTQ(weights="nvfp4", activations="nvfp4", activation_scale="static")
    result = compress.run(recipe(step, save={"format": "modelopt"}), tmp_path / "out")
    assert result.report["verified"]["transformers"] is None
    assert "Other programs were not run on such a checkpoint" in (tmp_path / "out" / "README.md").read_text()


def test_the_beginning_of_a_quantized_name_is_a_pattern():
    schemes = {"model.layers.0.mlp.gate_proj": coded("nvfp4", 16)}
    config = ModelOpt().config(schemes, ["model.layers.0.mlp.gate", "model.layers.0.mlp.experts.", "lm_head"], "1")
    assert config["ignore"] == ["model.layers.0.mlp.gat[e]", "model.layers.0.mlp.experts*", "lm_head"]
