"""MLX: exact both ways, its packing bit by bit, folders of mlx-lm, and what it cannot hold."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import tiny_model
from safetensors.torch import load_file
from schemes import coded, decoded, encoded, layer_of, rounding
from tolerances import same_logits

import compress
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.inspection import inspect
from compress.layers.linear import CompressedLinear

FORMAT = FORMATS["mlx"]
BITS = (2, 3, 4, 5, 6, 8)
IDS = torch.arange(24)[None] % 60
WIDE = {"hidden_size": 64, "intermediate_size": 96}


def unpacked(words, bits, width):
    """The codes of each row, one bit after the other: bit k of code i is bit i * bits + k of the row."""
    codes = np.zeros((len(words), width), dtype=np.int64)
    for row, numbers in enumerate(words.tolist()):
        stream = sum(number << (32 * i) for i, number in enumerate(numbers))
        for column in range(width):
            codes[row, column] = stream >> (column * bits) & (2**bits - 1)
    return codes


def dequantized(tensors, bits, size):
    """codes * scales + biases in float64."""
    width = tensors["scales"].shape[1] * size
    codes = unpacked(tensors["weight"], bits, width)
    scales, biases = (np.repeat(tensors[n].double().numpy(), size, axis=1) for n in ("scales", "biases"))
    return codes * scales + biases


@settings(max_examples=30)
@given(
    bits=st.sampled_from(BITS),
    rows=st.integers(1, 5),
    groups=st.integers(1, 3),
    group_size=st.sampled_from([32, 64, 128, 256, "channel", "tensor"]),
    kind=st.sampled_from(["symmetric", "zero points", "minima"]),
    seed=st.integers(0, 999),
)
def test_what_is_stored_is_the_weight_and_reads_back(make, same, bits, rows, groups, group_size, kind, seed):
    size = group_size if isinstance(group_size, int) else 32
    grid = f"uint{bits}" if kind == "minima" else f"int{bits}"
    part = make(grid, (rows, groups * size), group_size, kind == "symmetric", seed)
    assert FORMAT.refuses(layer_of(part)) is None
    stored = FORMAT.adapt_part(part)
    assert FORMAT.adapt(layer_of(part)) == layer_of(stored) and stored.grid.name == f"uint{bits}"
    assert torch.equal(stored.words, part.words)
    tensors = encoded(FORMAT, stored)
    weight = part.dense(torch.float64).expand(part.shape).numpy()
    tolerance = 2.0**-22 if kind == "zero points" else 0  # a bias is rounded to float32
    close = {"rtol": 0, "atol": np.abs(weight).max() * max(tolerance, 2.0**-50)}
    np.testing.assert_allclose(dequantized(tensors, bits, stored.group_size), weight, **close)
    config = json.loads(json.dumps(FORMAT.config({"a": layer_of(stored)}, ["b"], "1")))
    shapes = {f"a.{key}": tuple(tensor.shape) for key, tensor in tensors.items()}
    read = FORMAT.of_config(config).schemes(config, {"a": part.shape, "b": part.shape}, shapes)
    assert read == {"a": layer_of(stored)}
    same(decoded(FORMAT, tensors, read["a"]), stored)
    specs = FORMAT.tensors(read["a"])
    assert {n: tuple(t.shape) for n, t in tensors.items()} == {n: s.shape for n, s in specs.items()}


def test_the_packing_of_four_bits_by_hand(make):
    part = make("uint4", (1, 32), 32)
    codes = part.codes()
    codes.codes[0] = torch.arange(32) % 16
    words = encoded(FORMAT, type(part).of(codes))["weight"]
    assert words.dtype == torch.uint32 and words.tolist() == [[0x76543210, 0xFEDCBA98] * 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
def test_biases_without_zero_points_are_exact_in_16_bits(make, bits, dtype):
    stored = FORMAT.adapt_part(make(f"int{bits}", (4, 64), 32, dtype=dtype))
    assert torch.equal(stored.zero.double(), -(2 ** (bits - 1)) * stored.scale.double())
    assert stored.zero.dtype == dtype


def test_zero_points_are_rounded_to_the_dtype_of_scales(make):
    part = make("int8", (4, 64), 32, False, dtype=torch.bfloat16)
    exact = (-128 - part.zero.double()) * part.scale.double()
    stored = FORMAT.adapt_part(part)
    assert torch.equal(stored.zero, exact.to(torch.bfloat16))
    assert ((stored.zero.double() - exact).abs() <= 2.0**-8 * exact.abs()).all()


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (coded("int7", 32), "format mlx holds weights int2, int3, int4, int5, int6, int8, uint2"),
        (coded("nf4", 32), "not nf4; use one of them, or format: native"),
        (coded("uint4_k", 32, False, shape=(6, 256)), "not uint4_k"),
        (coded("int4", 16), "groups of 16 for 64 inputs do not consist of; use group_size: 32, 64"),
        (coded("int4", "channel", shape=(6, 48)), "leave the layer dense"),
        (coded("int4", 32, indexed=True), "act_order: static"),
        (coded("int4", 32, True, rounding()), "use activations: none"),
    ],
)
def test_what_it_cannot_hold_is_refused_with_what_to_write(scheme, words):
    assert words in FORMAT.refuses(scheme)


@pytest.mark.parametrize("options", [{"group_size": 16}, {"weights": "nf4", "group_size": 32}])
def test_plan_and_save_refuse_it_at_once(options, recipe, tmp_path):
    step = compress.RTN(**options)
    for refused in (
        lambda: compress.plan(recipe(step, save={"format": "mlx"})),
        lambda: saved(tmp_path / "m", "llama", step),
    ):
        with pytest.raises(compress.errors.TargetError, match="format mlx h"):
            refused()
    assert not (tmp_path / "m").exists()


def test_experts_that_are_stacked_are_stored_alike():
    names = [f"m.0.mlp.experts.{i}.up_proj" for i in range(2)]
    alike = coded("uint4", 32, False)
    assert FORMAT.clash(dict.fromkeys(names, alike)) is None
    other = coded("uint8", 32, False)
    message = FORMAT.clash({names[0]: alike, names[1]: other, "m.0.mlp.gate_proj": other})
    assert "mlx-lm stacks m.0.mlp.experts.*.up_proj" in message and "uint4, group 32, uint8, group 32" in message


def saved(folder, family="llama", *passes, **changes):
    """The compressed model, saved in format mlx."""
    model = compress.apply(tiny_model(family, **WIDE, **changes), list(passes), IDS)
    compress.save(model, folder, "mlx")
    return model


ALL = {"rtn": {"weights": "uint4", "group_size": 32, "overrides": {"*.up_proj": {"weights": "int8"}}}}
EMBEDDINGS = {"rtn": {"weights": "uint6", "group_size": 32, "targets": ["embed_tokens", "lm_head"]}}


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_a_model_reads_back(family, tied, tmp_path):
    model = saved(tmp_path / "m", family, ALL, EMBEDDINGS, tie_word_embeddings=tied)
    tensors = {n: t for path in (tmp_path / "m").glob("*.safetensors") for n, t in load_file(path).items()}
    assert tensors["model.embed_tokens.weight"].dtype == torch.uint32
    assert ("lm_head.scales" in tensors) is not tied
    assert ("model.layers.0.self_attn.q_proj.bias" in tensors) is (family == "qwen2")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "mlx", **config["quantization"]}
    assert {k: config["quantization"][k] for k in ("bits", "group_size", "mode")} == {
        "bits": 4,
        "group_size": 32,
        "mode": "affine",
    }
    assert config["quantization"]["model.layers.1.mlp.up_proj"]["bits"] == 8
    assert config["quantization"]["model.embed_tokens"]["bits"] == 6
    loaded, _ = compress.load(tmp_path / "m")
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    layers = {name for name, module in loaded.named_modules() if isinstance(module, CompressedLinear)}
    assert len(layers) == 21 + (1 if tied else 2)


def test_folders_that_mlx_lm_wrote_have_no_method_and_entries_of_some_layers(tmp_path):
    model = saved(tmp_path / "m", "llama", ALL, EMBEDDINGS, tie_word_embeddings=True)
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    stated = {"group_size": 32, "bits": 4, "model.layers.0.mlp.gate": False}
    config |= {"quantization": stated, "quantization_config": stated}
    path.write_text(json.dumps(config))
    (tmp_path / "m" / "SHA256SUMS").unlink()
    torch.testing.assert_close(compress.load(tmp_path / "m")[0](IDS).logits, model(IDS).logits)
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    torch.testing.assert_close(compress.load(tmp_path / "m")[0](IDS).logits, model(IDS).logits)


def test_it_is_the_source_of_another_format_without_its_entries(tmp_path):
    saved(tmp_path / "m", "llama", ALL)
    compress.export(tmp_path / "m", tmp_path / "native", "native")
    config = json.loads((tmp_path / "native" / "config.json").read_text())
    assert "quantization" not in config
    one, other = (compress.load(tmp_path / name)[0](IDS).logits for name in ("m", "native"))
    assert same_logits(one, other)


def test_inspection_names_grids_of_layers_that_differ(tmp_path):
    saved(tmp_path / "m", "llama", ALL)
    modules = {module.name: module for module in inspect(tmp_path / "m").modules}
    assert modules["model.layers.0.self_attn.q_proj"].grid == "uint4"
    up = modules["model.layers.0.mlp.up_proj"]
    assert (up.grid, up.group_size, up.shape) == ("uint8", 32, (96, 64))


@pytest.mark.parametrize(
    ("rope", "entries"),
    [
        ({"rope_type": "default", "rope_theta": 500.0}, {"rope_theta": 500.0}),
        (
            {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            {
                "rope_theta": 500.0,
                "rope_scaling": {"type": "linear", "rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            },
        ),
    ],
)
def test_the_rotary_embedding_is_stated_as_models_of_mlx_lm_read_it(rope, entries, tmp_path):
    model = saved(tmp_path / "m", "llama", ALL, rope_parameters=rope)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert {key: config.get(key) for key in entries} == entries
    torch.testing.assert_close(compress.load(tmp_path / "m")[0](IDS).logits, model(IDS).logits)


def test_gemma_has_two_rotary_embeddings(tmp_path):
    saved(tmp_path / "m", "gemma3", {"rtn": {"weights": "uint4", "group_size": 32}})
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    parameters = config["rope_parameters"]
    assert config["rope_theta"] == parameters["full_attention"]["rope_theta"]
    assert config["rope_local_base_freq"] == parameters["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "mxfp4"}, "mode = 'mxfp4' is not read; accepted: affine, null"),
        ({"bits": 7}, "bits = 7 is not read"),
        ({"new": 1}, "new = 1 is not known"),
        ({"model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 16}}, "group_size = 16 is not read"),
    ],
)
def test_another_config_is_an_error(changes, words):
    with pytest.raises(ValueError, match=words):
        FORMAT.of_config({"group_size": 32, "bits": 4, **changes})


def test_a_damaged_layer_is_named(make):
    part = make("uint4", (8, 64), 32)
    tensors = encoded(FORMAT, part)
    with pytest.raises(ValueError, match=r"weight is torch.uint32 \[4, 8\], but it must be torch.uint32 \[8, 8\]"):
        decoded(FORMAT, {**tensors, "weight": tensors["weight"][:4]}, layer_of(part))
    with pytest.raises(KeyError, match="biases"):
        decoded(FORMAT, {k: v for k, v in tensors.items() if k != "biases"}, layer_of(part))
    with pytest.raises(ValueError, match=r"scales are torch.float32, but biases are torch.float16"):
        decoded(FORMAT, {**tensors, "biases": tensors["biases"].half()}, layer_of(part))


def test_transformers_refuses_the_folder(tmp_path):
    from transformers import AutoModelForCausalLM

    saved(tmp_path / "m", "llama", ALL)
    with pytest.raises((ValueError, RuntimeError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "m")


def test_experts_that_mlx_lm_does_not_stack_are_refused(tmp_path):
    with pytest.raises(compress.errors.SaveError, match="mlx-lm is not known to stack quantized experts"):
        saved(tmp_path / "m", "mixtral", {"rtn": {"weights": "uint4", "group_size": 32}})


def test_the_plan_says_that_groups_get_minima(recipe):
    notes = compress.plan(recipe(compress.RTN(group_size=32), save={"format": "mlx"})).notes
    assert any("format mlx stores a zero point or a minimum for every group" in note for note in notes)
