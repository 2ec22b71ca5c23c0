"""Sources that are quantized already, in fp8, mxfp4 and modelopt, by folders that numpy and torch write."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import quantized_sources as sources
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, Mxfp4Config

import compress
from compress.checkpoint.formats import FORMATS, READ_ONLY
from compress.checkpoint.inspection import inspect
from compress.checkpoint.opening import open_model
from compress.errors import ModelError
from compress.layers.linear import CompressedLinear

E8M0 = torch.uint8
CASES: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "fp8": lambda folder: sources.fp8(sources.qwen3(), folder),
    "fp8 in bfloat16 scales": lambda folder: sources.fp8(sources.qwen3_moe(), folder, scale_dtype=torch.bfloat16),
    "fp8 with exponents": lambda folder: sources.fp8(sources.llama(), folder, (1, 32), E8M0, scale_fmt="ue8m0"),
    "fp8 per tensor": lambda folder: sources.fp8(sources.llama(), folder, None),
    "fp8 of minimax": lambda folder: sources.fp8(sources.minimax(), folder),
    "fp8 of deepseek": lambda folder: sources.fp8(sources.deepseek(), folder),
    "mxfp4": lambda folder: sources.mxfp4(sources.gpt_oss(), folder),
    "modelopt fp8": lambda folder: sources.modelopt_fp8(sources.llama(), folder),
    "modelopt nvfp4": lambda folder: sources.modelopt_nvfp4(sources.llama(), folder),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(case) -> (folder, dense weights by the names of the stored layers)."""
    return sources.maker(CASES, tmp_path_factory)


@pytest.fixture
def copied(made, tmp_path):
    """copied(case) -> a copy of its folder."""
    return lambda case: Path(shutil.copytree(made(case)[0], tmp_path / "copy"))


def layers_of(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, CompressedLinear)}


def single(dense):
    """Dense weights by the names of linears; those of experts one by one, by the names of transformers."""
    weights = {}
    for name, weight in dense.items():
        name = name.replace("block_sparse_moe", "mlp")  # MiniMax
        owner, _, leaf = name.removesuffix(".weight").rpartition(".")
        if weight.ndim == 2:
            weights[f"{owner}.{leaf}"] = weight
        else:
            weights |= {f"{owner}.{i}.{leaf}": part for i, part in enumerate(weight)}
    return weights


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_that_the_layout_states(case, made):
    folder, dense = made(case)
    layers = layers_of(compress.load(folder)[0])
    tolerance = 1e-6 if "nvfp4" in case else 2**-8 if "bfloat16" in case else 0  # a reciprocal; a rounded scale
    weights = single(dense)
    assert len(weights) >= 14
    for name, weight in weights.items():
        assert torch.allclose(layers[name].weight_as(torch.float32), weight, rtol=tolerance, atol=0), name


@pytest.mark.parametrize(
    ("case", "model_class", "config"),
    [
        ("fp8 in bfloat16 scales", "Qwen3MoeForCausalLM", FineGrainedFP8Config(dequantize=True)),
        ("fp8 with exponents", "LlamaForCausalLM", FineGrainedFP8Config(dequantize=True)),
        ("fp8 per tensor", "LlamaForCausalLM", FineGrainedFP8Config(dequantize=True)),
        ("mxfp4", "GptOssForCausalLM", Mxfp4Config(dequantize=True)),
    ],
)
def test_the_outputs_are_those_of_transformers(case, model_class, config, made):
    folder, _ = made(case)
    theirs = getattr(transformers, model_class).from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    ours = compress.load(folder, dtype="float32")[0]
    for layer in layers_of(ours).values():
        layer.round_inputs(None)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected, logits = theirs.float()(input_ids=ids).logits, ours(input_ids=ids).logits
    assert torch.allclose(logits, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("block", [(1 << 40, 1 << 40), (128, 1 << 40), (1 << 62, 128)])
def test_blocks_far_larger_than_the_weights_take_no_memory(block, tmp_path):
    """A scale is repeated for the weights that there are, also in compressed-tensors."""
    dense = single(sources.fp8(sources.llama(), tmp_path / "model", block))
    compress.export(tmp_path / "model", tmp_path / "other", "compressed-tensors")
    for folder in ("model", "other"):
        layers = layers_of(compress.load(tmp_path / folder)[0])
        for name, weight in dense.items():
            torch.testing.assert_close(layers[name].weight.float(), weight, rtol=2**-7, atol=0)


def test_inputs_are_rounded_as_the_source_states(made):
    texts = {
        case: {t.text for layer in layers_of(compress.load(made(case)[0])[0]).values() for t in layer.scheme.transforms}
        for case in ("fp8 of deepseek", "fp8 per tensor", "modelopt nvfp4", "mxfp4")
    }
    assert texts["fp8 of deepseek"] == {"inputs fp8_e4m3 per 128 columns"}
    assert texts["fp8 per tensor"] == {"inputs fp8_e4m3"}
    assert texts["modelopt nvfp4"] == {"inputs nvfp4 per 16 columns, static global scale"}
    assert texts["mxfp4"] == set()


def test_inputs_of_nvfp4_without_a_scale_stay_in_16_bits(copied):
    folder = copied("modelopt nvfp4")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: t for name, t in tensors.items() if not name.endswith("input_scale")}, folder / "model.safetensors"
    )
    assert all(layer.rounding is None for layer in layers_of(compress.load(folder)[0]).values())


def test_nvfp4_becomes_compressed_tensors_with_equal_codes_and_reciprocal_global_scales(made, tmp_path):
    folder, _ = made("modelopt nvfp4")
    compress.export(folder, tmp_path / "out", "compressed-tensors")
    source, written = load_file(folder / "model.safetensors"), {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(path)
    assert torch.equal(written[f"{Q}.weight_packed"], source[f"{Q}.weight"])
    assert torch.equal(written[f"{Q}.weight_scale"].float(), source[f"{Q}.weight_scale"].float())
    assert written[f"{Q}.weight_global_scale"] == 1 / source[f"{Q}.weight_scale_2"]
    assert written[f"{Q}.input_global_scale"] == 1 / source[f"{Q}.input_scale"]


def test_inspect_names_grids_and_blocks(made):
    kinds = {
        case: {module.stored_as for module in inspect(made(case)[0]).modules if module.grid != "dense"}
        for case in ("fp8", "mxfp4", "modelopt nvfp4")
    }
    assert kinds["fp8"] == {"fp8_e4m3, group 128x128"}
    assert kinds["mxfp4"] == {"mxfp4, group 32"}
    assert kinds["modelopt nvfp4"] == {"nvfp4, group 16, static inputs"}
    experts = next(m for m in inspect(made("mxfp4")[0]).modules if m.name.endswith("experts.down_proj"))
    assert experts.shape == (4, 128, 128) and experts.bits_per_weight == pytest.approx(4.25)


def test_they_are_no_formats_of_a_recipe():
    assert not READ_ONLY.keys() & FORMATS.keys()
    for format_ in READ_ONLY.values():
        assert "is read and not written" in format_.refuses(None)


def change_config(folder, **values):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= values
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("case", "values", "message"),
    [
        ("fp8", {"zork": 1}, "zork = 1 is not known; known keys: "),
        ("fp8", {"expert_dtype": "fp4"}, "expert_dtype = 'fp4' is not read; accepted: fp8, null"),
        ("fp8", {"weight_block_size": [128]}, "weight_block_size = [128] is not read"),
        ("fp8", {"activation_scheme": "token"}, "activation_scheme = 'token' is not read"),
        ("mxfp4", {"bits": 4}, "bits = 4 is not known"),
        ("modelopt nvfp4", {"quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ' is not read; accepted: FP8, "),
        ("modelopt nvfp4", {"pre_quant_scale": True}, "pre_quant_scale = True is not read"),
        ("modelopt nvfp4", {"quant_algo": "MXFP8"}, "quant_algo is MXFP8, but the tensors of"),
        ("modelopt nvfp4", {"quant_algo": "W4A16_NVFP4"}, "are those of NVFP4: nvfp4, group 16, with rounded inputs"),
        ("fp8 per tensor", {"activation_scheme": "dynamic"}, "holds tensors that are not read: model.layers.0.mlp.do"),
    ],
)
def test_other_keys_and_values_are_errors_that_name_them(case, values, message, copied):
    folder = copied(case)
    change_config(folder, **values)
    with pytest.raises(ModelError) as caught:
        compress.load(folder)
    assert message in str(caught.value)


def test_another_program_is_refused_with_a_remedy(copied):
    folder = copied("fp8")
    change_config(folder, quant_method="quark")
    with pytest.raises(ModelError, match=r"'quark', which compress does not read; start from its dense model, or deq"):
        compress.load(folder)


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


def not_a_number(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[0] = float("nan")
    return tensor


def filled(number):
    return lambda tensor: torch.full_like(tensor.view(torch.uint8), number).view(tensor.dtype)


Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.experts.gate_up_proj"
DAMAGED = {
    "no scale": ("fp8", drop(f"{Q}.weight_scale_inv"), f"{Q}.weight in .* holds F8_E4M3, .* it has no scale"),
    "a scale that is NaN": (
        "fp8",
        put(f"{Q}.weight_scale_inv", not_a_number),
        f"{Q}.weight_scale holds a number that is",
    ),
    "scales of other blocks": (
        "fp8",
        put(f"{Q}.weight_scale_inv", lambda t: t.repeat(2, 1)),
        rf"{Q}.weight_scale_inv is \[2, 1\], but a weight 128 x 128 has 1 x 1 blocks of 128 x 128",
    ),
    "codes that are NaN": ("fp8", put(f"{Q}.weight", filled(0x7F)), f"{Q}.weight_packed holds codes that fp8_e4m3"),
    "an integer scale": ("fp8", put(f"{Q}.weight_scale_inv", lambda t: t.int()), f"{Q}.weight_scale holds torch.int32"),
    "no weight": ("fp8", drop(f"{Q}.weight"), f"{Q} lacks its tensor weight"),
    "no input scale": ("fp8 per tensor", drop(f"{Q}.activation_scale"), f"{Q} lacks its tensor activation_scale"),
    "a negative input scale": (
        "fp8 per tensor",
        put(f"{Q}.activation_scale", torch.neg),
        f"{Q}.activation_scale is -0.05.*must be positive",
    ),
    "several scales": (
        "fp8 per tensor",
        put(f"{Q}.weight_scale_inv", lambda t: t.repeat(3)),
        rf"{Q}.weight_scale_inv is \[3\], but it must be one number",
    ),
    "no scales of experts": ("mxfp4", drop(f"{UP}_scales"), "experts.0.gate_up_proj lacks its tensor scales"),
    "fewer experts": ("mxfp4", put(f"{UP}_blocks", lambda t: t[:2]), r"gate_up_proj_blocks in .* has 4 experts"),
    "an infinite exponent": (
        "mxfp4",
        put(f"{UP}_scales", filled(255)),
        "experts.0.gate_up_proj.weight_scale holds a num",
    ),
    "other blocks": (
        "mxfp4",
        put(f"{UP}_blocks", lambda t: t[..., :8]),
        r"experts.0.gate_up_proj.blocks is torch.uint8",
    ),
    "no second scale": ("modelopt nvfp4", drop(f"{Q}.weight_scale_2"), f"{Q} lacks its tensor weight_scale_2"),
    "a second scale of zero": (
        "modelopt nvfp4",
        put(f"{Q}.weight_scale_2", torch.zeros_like),
        f"{Q}.weight_scale_2 is 0.0, but it must be positive",
    ),
    "an input scale of zero": (
        "modelopt nvfp4",
        put(f"{Q}.input_scale", torch.zeros_like),
        f"{Q}.input_scale is 0.0, but it must be positive",
    ),
    "scales per column": (
        "modelopt fp8",
        put(f"{Q}.weight_scale", lambda t: t.repeat(7)),
        rf"{Q}.weight_scale is \[7\], which no layout of FP8 has for a weight 128 x 128",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_tensors_are_errors_that_name_them(damage, copied):
    case, change, message = DAMAGED[damage]
    folder = copied(case)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        compress.load(folder)


def test_an_input_scale_that_the_algorithm_states_must_be_stored(copied):
    folder = copied("modelopt fp8")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{Q}.input_scale"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"quant_algo is FP8, but the tensors of {Q} are those of no algorithm: fp8"):
        compress.load(folder)


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (("scales", "key"), "kv_cache_quant_algo, scales of the KV cache"),
        (("key",), "kv_cache_quant_algo"),
        (("scales",), "scales of the KV cache"),
        ((), None),
    ],
)
def test_a_rounded_cache_that_is_not_read_is_a_note(kept, told, copied):
    folder = copied("modelopt fp8")
    tensors, path = load_file(folder / "model.safetensors"), folder / "hf_quant_config.json"
    if "scales" not in kept:
        tensors = {name: t for name, t in tensors.items() if not name.endswith((".k_scale", ".v_scale"))}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if "key" not in kept:
        stated = json.loads(path.read_text())
        stated["quantization"]["kv_cache_quant_algo"] = None
        path.write_text(json.dumps(stated))
    notes = [note for note in open_model(str(folder)).notes if "KV cache" in note]
    assert notes == ([] if told is None else [f"left out: {told}; the KV cache is not rounded"])


def test_an_unreadable_hf_quant_config_is_an_error_that_names_it(copied):
    folder = copied("modelopt fp8")
    (folder / "hf_quant_config.json").write_text('{"quantization": 3}')
    with pytest.raises(ModelError, match=r"hf_quant_config.json cannot be read: it has no object 'quantization'"):
        compress.load(folder)
