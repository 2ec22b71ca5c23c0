"""The compressed-tensors family: the layout of every layer, and a config that its owner validates and we read back."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, OPTConfig

from compress.errors import ModelError
from compress.formats import FORMATS
from compress.formats.base import CacheScheme
from compress.formats.layouts.pack_quantized import PackQuantized
from compress.numerics.quant.grids import GRIDS
from compress.weights.base import Scheme

FORMAT = FORMATS["compressed-tensors"]
INT8 = GRIDS["int8"]
SCHEMES = {
    "W4A16 g32": Scheme(GRIDS["int4"], 32, True),
    "W4A16 asymmetric": Scheme(GRIDS["int4"], 32, False),
    "W3A16 channel": Scheme(GRIDS["int3"], "channel", True),
    "W8A16 tensor": Scheme(INT8, "tensor", True),
    "W8A8": Scheme(INT8, "channel", True, activations=INT8),
    "W8A8 asymmetric": Scheme(INT8, "channel", False, activations=INT8),
    "W4A8 g32": Scheme(GRIDS["int4"], 32, True, activations=INT8),
    "W8A8 static": Scheme(INT8, "channel", True, activations=INT8, activation_scale="static"),
    "FP8": Scheme(GRIDS["fp8_e4m3"], "channel", True, activations=GRIDS["fp8_e4m3"]),
    "FP8 weights": Scheme(GRIDS["fp8_e4m3"], "tensor", True),
    "MXFP4": Scheme(GRIDS["mxfp4"], 32, True),
    "NVFP4": Scheme(GRIDS["nvfp4"], 16, True),
}
LAYOUT = {
    "W8A8": "int-quantized",
    "W8A8 asymmetric": "int-quantized",
    "W8A8 static": "int-quantized",
    "FP8": "float-quantized",
    "FP8 weights": "float-quantized",
    "MXFP4": "mxfp4-pack-quantized",
    "NVFP4": "nvfp4-pack-quantized",
}
NAMES = ["model.layers.0.a", "model.layers.0.b", "model.layers.1.a", "lm_head"]


@pytest.mark.parametrize("name", SCHEMES)
def test_the_layout_follows_from_the_scheme_and_is_exact(make, same, name):
    scheme = SCHEMES[name]
    packed = make(scheme.grid.name, (6, 64), scheme.group_size, scheme.symmetric)
    tensors = FORMAT.encode(packed, scheme.activations)
    assert ("weight" in tensors) == (LAYOUT.get(name) in ("int-quantized", "float-quantized"))
    same(FORMAT.decode(tensors, scheme), packed)


@pytest.mark.parametrize("name", SCHEMES)
def test_one_scheme_is_written_for_all_linears_and_read_back(name):
    schemes = dict.fromkeys(NAMES[:3], SCHEMES[name])
    config = FORMAT.config(schemes, ["lm_head"], "0.1")
    [group] = config["config_groups"].values()
    assert group["targets"] == ["Linear"]
    layout = LAYOUT.get(name, "pack-quantized")
    assert (config["format"], group["format"]) == (layout, layout)
    assert config["ignore"] == ["lm_head"]
    assert config["quantization_status"] == "compressed"
    assert FORMAT.schemes(json.loads(json.dumps(config)), NAMES) == schemes


def test_several_schemes_are_written_by_name_and_read_back():
    schemes = dict(zip(NAMES, list(SCHEMES.values())[3:7], strict=True)) | {"model.layers.1.b": SCHEMES["W8A8"]}
    config = FORMAT.config(schemes, ["model.layers.1.c"], "0.1")
    groups = list(config["config_groups"].values())
    assert [group["targets"] for group in groups] == [
        ["model.layers.0.a"], ["model.layers.0.b", "model.layers.1.b"], ["model.layers.1.a"], ["lm_head"],
    ]  # fmt: skip
    assert config["format"] == "mixed-precision"
    assert [g["format"] for g in groups] == ["pack-quantized", "int-quantized", "int-quantized", "pack-quantized"]
    assert FORMAT.schemes(json.loads(json.dumps(config)), [*NAMES, "model.layers.1.b", "model.layers.1.c"]) == schemes


def test_several_schemes_of_one_layout_name_that_layout():
    schemes = {"a": SCHEMES["W4A16 g32"], "b": SCHEMES["W3A16 channel"]}
    assert FORMAT.config(schemes, [], "0.1")["format"] == "pack-quantized"


def test_the_width_of_a_layer_makes_no_group_of_its_own():
    scheme = SCHEMES["W4A16 g32"]
    schemes = {"a": replace(scheme, width=64), "b": replace(scheme, width=128)}
    assert len(FORMAT.config(schemes, [], "0.1")["config_groups"]) == 1


FP8_CACHE = CacheScheme(GRIDS["fp8_e4m3"], GRIDS["fp8_e4m3"], "static")


@pytest.mark.parametrize("schemes", [{}, {"a": SCHEMES["W4A16 g32"]}])
def test_a_rounded_cache_is_stated_as_its_owner_has_it_and_read_back(schemes):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = json.loads(json.dumps(FORMAT.config(schemes, ["lm_head"], "0.1", FP8_CACHE)))
    theirs = quantization.QuantizationConfig.model_validate(config).kv_cache_scheme
    assert (theirs.num_bits, theirs.type, theirs.strategy) == (8, "float", "tensor")
    assert theirs.symmetric and not theirs.dynamic
    assert FORMAT.cached(config) == FP8_CACHE
    assert FORMAT.cached(FORMAT.config({"a": SCHEMES["FP8"]}, [], "0.1")) is None


@pytest.mark.parametrize(
    "scheme",
    [
        CacheScheme(FP8_CACHE.keys, FP8_CACHE.values, "token"),
        CacheScheme(FP8_CACHE.keys, None, "static"),
        CacheScheme(INT8, INT8, "static"),
    ],
)
def test_other_ways_to_round_a_cache_are_not_stated(scheme):
    grouped = LlamaConfig(num_key_value_heads=4)
    assert FORMAT.states(FP8_CACHE, grouped) and not FORMAT.states(scheme, grouped)
    assert not FORMAT.states(FP8_CACHE, OPTConfig()), "compressed-tensors looks for num_key_value_heads"
    assert not FORMATS["native"].states(FP8_CACHE, grouped)


def test_without_compressed_layers_there_is_no_config():
    assert FORMAT.config({}, ["lm_head"], "0.1") is None


@pytest.mark.parametrize("name", [*SCHEMES, "mixed"])
def test_compressed_tensors_validates_the_config(name):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    schemes = dict(zip("abcdefghijkl", SCHEMES.values(), strict=True)) if name == "mixed" else {"a": SCHEMES[name]}
    config = FORMAT.config(schemes, ["lm_head"], "0.1")
    theirs = quantization.QuantizationConfig.model_validate(json.loads(json.dumps(config)))
    assert theirs.quantization_status == "compressed"
    assert theirs.ignore == ["lm_head"]
    assert len(theirs.config_groups) == len(config["config_groups"]) == len(schemes)
    for scheme, group in zip(schemes.values(), theirs.config_groups.values(), strict=True):
        weights, inputs = group.weights, group.input_activations
        kind = "int" if scheme.grid.name.startswith("int") else "float"
        assert (weights.num_bits, weights.type, weights.symmetric) == (scheme.grid.bits, kind, scheme.symmetric)
        assert (weights.group_size or weights.strategy) == scheme.group_size
        assert (inputs is None) == (scheme.activations is None)
        if inputs is not None:
            static = scheme.activation_scale == "static"
            wanted = (8, "tensor", False, True) if static else (8, "token", True, True)
            assert (inputs.num_bits, inputs.strategy, inputs.dynamic, inputs.symmetric) == wanted


@pytest.mark.parametrize(
    "name", [name for name in SCHEMES if name != "FP8 weights"]
)  # which it chooses for itself with inputs only
def test_compressed_tensors_would_choose_the_same_layout(name):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    base = pytest.importorskip("compressed_tensors.compressors.base")
    config = FORMAT.config({"a": SCHEMES[name]}, [], "0.1")
    theirs = quantization.QuantizationConfig.model_validate(config)
    group = theirs.config_groups["group_0"]
    compressor = base.BaseCompressor.get_value_from_registry(group.format)
    assert compressor.can_compress(torch.nn.Linear, group)


def test_the_names_of_their_tensors_are_the_names_of_ours(make):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    base = pytest.importorskip("compressed_tensors.compressors.base")
    for scheme in SCHEMES.values():
        group = FORMAT.config({"a": scheme}, [], "0.1")["config_groups"]["group_0"]
        theirs = quantization.QuantizationScheme.model_validate(group)
        names = base.BaseCompressor.get_value_from_registry(theirs.format).compression_param_names(theirs)
        packed = make(scheme.grid.name, (6, 64), scheme.group_size, scheme.symmetric)
        assert set(FORMAT.encode(packed, scheme.activations)) == set(names)


FP8 = GRIDS["fp8_e4m3"]


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (
            replace(SCHEMES["W8A8"], activations=FP8),
            "activations fp8_e4m3 cannot be combined with integer weights; use int8, or format: native",
        ),
        (
            Scheme(GRIDS["nf4"], 64, True),
            "weights nf4 have no layout; use int2 to int8, fp8_e4m3, mxfp4 or nvfp4, or format: native",
        ),
        (Scheme(GRIDS["fp4_e2m1"], 32, True), "weights fp4_e2m1 have no layout"),
        (
            Scheme(GRIDS["fp8_e5m2"], "channel", True),
            "weights fp8_e5m2 have no reader; use fp8_e4m3, or format: native",
        ),
        (Scheme(FP8, 64, True), "fp8_e4m3 has no layout for groups; use group_size: channel or tensor"),
        (replace(SCHEMES["FP8"], activations=INT8), "fp8_e4m3 weights go with activations none or fp8_e4m3"),
        (replace(SCHEMES["MXFP4"], activations=INT8), "mxfp4 weights are read with activations none only"),
        (replace(SCHEMES["NVFP4"], activations=FP8), "nvfp4 weights are read with activations none only"),
        (replace(SCHEMES["NVFP4"], indexed=True), "act_order: group has no reader for nvfp4; use act_order: static"),
        (replace(SCHEMES["MXFP4"], width=80), "mxfp4 has groups of 32 columns, which do not divide the 80 inputs"),
        (replace(SCHEMES["NVFP4"], width=72), "nvfp4 has groups of 16 columns, which do not divide the 72 inputs"),
    ],
)
def test_what_has_no_reader_is_refused_with_what_has_one(scheme, message):
    assert FORMAT.refuses(scheme, (8, scheme.width or 64)).startswith(message)


def test_a_layout_of_others_is_an_error():
    config = FORMAT.config({"a": SCHEMES["MXFP4"]}, [], "0.1")
    config["config_groups"]["group_0"]["format"] = "mxfp8-quantized"
    with pytest.raises(ModelError, match="layout 'mxfp8-quantized' of compressed-tensors cannot be read; known: int-q"):
        FORMAT.schemes(config, ["a"])


def test_transformers_is_asked_to_multiply_out_what_it_would_run_wrongly():
    asked = {name: "run_compressed" in FORMAT.config({"a": scheme}, [], "0.1") for name, scheme in SCHEMES.items()}
    assert {name for name in SCHEMES if asked[name]} == {"W4A16 asymmetric", "MXFP4", "NVFP4"}
    mixed = {"a": SCHEMES["MXFP4"], "b": SCHEMES["NVFP4"]}  # it multiplies out one scheme at most
    assert "run_compressed" not in FORMAT.config(mixed, [], "0.1")


def test_others_may_have_stored_bytes_for_byte_inputs_in_words(make, same):
    packed = make("int8", (6, 64), "channel")
    same(FORMAT.decode(PackQuantized().encode(packed), SCHEMES["W8A8"]), packed)


def test_their_layer_has_a_place_for_the_static_scale():
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = FORMAT.config({"a": SCHEMES["W8A8 static"]}, [], "0.1")
    module = torch.nn.Sequential(torch.nn.Linear(64, 6))
    quantization.apply_quantization_config(module, quantization.QuantizationConfig.model_validate(config))
    [(name, (length, _))] = replace(SCHEMES["W8A8 static"], width=64).input_tensors.items()
    assert module[0].get_parameter(FORMAT.input_names[name]).shape == (length,)


def test_activations_in_floats_are_refused():
    message = FORMAT.refuses(replace(SCHEMES["W8A8"], activations=GRIDS["fp8_e4m3"]), (8, 64))
    assert message == "activations fp8_e4m3 cannot be combined with integer weights; use int8, or format: native"


def test_what_the_packed_layout_refuses_is_refused():
    assert "use 20, 25, 50, 100, channel, or format: native" in FORMAT.refuses(Scheme(INT8, 64, True), (8, 100))
    assert all(FORMAT.refuses(scheme, (6, 64)) is None for scheme in SCHEMES.values())


def test_short_groups_are_adapted(make):
    packed = make("int4", (4, 96), 64)
    assert FORMAT.adapt(packed).group_size == 32


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"outlier_threshold": 6.0}, "cannot say that outlier columns are computed in floats"),
        ({"outlier_columns": True}, "cannot say that outlier columns are computed in floats"),
        ({"input_scaled": True}, "its inputs are divided by a scale that nothing before it could take up"),
    ],
)
def test_what_has_no_word_in_the_format_is_refused_with_what_has(changed, message):
    reason = FORMAT.refuses(replace(SCHEMES["W8A8"], **changed), (6, 64))
    assert message in reason and reason.endswith("use format: native")


@pytest.mark.parametrize("name", ["W4A8 g32", "W8A16 tensor"])
def test_a_static_scale_needs_the_integer_layout(name):
    static = replace(SCHEMES[name], activations=INT8, activation_scale="static")
    reason = FORMAT.refuses(static, (6, 64))
    if name == "W4A8 g32":
        assert "use activation_scale: token, or format: native" in reason
    else:
        assert reason is None
