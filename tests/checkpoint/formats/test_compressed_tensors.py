"""The compressed-tensors family: the layout of every layer, and a config that its owner validates and we read back."""

import json
from dataclasses import replace

import pytest
import torch
from schemes import PERMUTED, SCALED, coded, decoded, layer_of, rounding
from transformers import LlamaConfig, OPTConfig

from compress.checkpoint.formats import FORMATS
from compress.checkpoint.formats.compressed_tensors import layout_of
from compress.checkpoint.formats.layouts.pack_quantized import PackQuantized
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.rounding import InputRounding
from compress.models.caches.grid import GridCache
from compress.numerics.quant.grids import GRIDS

FORMAT = FORMATS["compressed-tensors"]
INT8 = GRIDS["int8"]
SCHEMES = {
    "W4A16 g32": coded(),
    "W4A16 asymmetric": coded("int4", 32, False),
    "W3A16 channel": coded("int3", "channel"),
    "W8A16 tensor": coded("int8", "tensor"),
    "W8A8": coded("int8", "channel", True, rounding()),
    "W8A8 asymmetric": coded("int8", "channel", False, rounding()),
    "W4A8 g32": coded("int4", 32, True, rounding()),
    "W8A8 static": coded("int8", "channel", True, rounding(scale="static")),
    "FP8": coded("fp8_e4m3", "channel", True, rounding("fp8_e4m3")),
    "FP8 weights": coded("fp8_e4m3", "tensor"),
    "MXFP4": coded("mxfp4"),
    "NVFP4": coded("nvfp4", 16),
    "MXFP8": coded("mxfp8"),
    "W4AFP8": coded("int4", 32, True, rounding("fp8_e4m3")),
    "MXFP4 inputs": coded("mxfp4", 32, True, rounding("mxfp4", scale="group", group=32)),
    "MXFP8 inputs": coded("mxfp8", 32, True, rounding("mxfp8", scale="group", group=32)),
    "NVFP4 inputs": coded("nvfp4", 16, True, rounding("nvfp4", scale="local", group=16)),
}
LAYOUT = {
    "W8A8": "int-quantized",
    "W8A8 asymmetric": "int-quantized",
    "W8A8 static": "int-quantized",
    "FP8": "float-quantized",
    "FP8 weights": "float-quantized",
    "MXFP4": "mxfp4-pack-quantized",
    "NVFP4": "nvfp4-pack-quantized",
    "MXFP8": "mxfp8-quantized",
    "MXFP4 inputs": "mxfp4-pack-quantized",
    "MXFP8 inputs": "mxfp8-quantized",
    "NVFP4 inputs": "nvfp4-pack-quantized",
}
IN_BYTES = ("int-quantized", "float-quantized", "mxfp8-quantized")
"""Layouts with one byte per weight."""
NAMES = ["model.layers.0.a", "model.layers.0.b", "model.layers.1.a", "lm_head"]


def shapes(*names):
    """Linears of the model, of one shape."""
    return dict.fromkeys(names, (6, 64))


def made(make, scheme):
    """A part of a layer of this scheme."""
    codes = scheme.codes
    return make(codes.grid.name, (6, 64), codes.group_size, codes.symmetric)


def stored(make, scheme):
    """Part, transforms and tensors of a layer of this scheme."""
    static = scheme.rounding is not None and scheme.rounding.scale == "static"
    local = scheme.rounding is not None and scheme.rounding.scale == "local"
    scale = {"scale": torch.tensor([0.25]) if static else None, "shared": torch.tensor([96.0]) if local else None}
    transforms = [InputRounding(t, scheme.shape, scale) for t in scheme.transforms]
    part = made(make, scheme)
    return part, transforms, FORMAT.encode(scheme, [part], transforms)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_layout_follows_from_the_scheme_and_is_exact(make, same, name):
    scheme = SCHEMES[name]
    part, transforms, tensors = stored(make, scheme)
    assert ("weight" in tensors) == (LAYOUT.get(name) in IN_BYTES)
    assert ("input_scale" in tensors) == (name == "W8A8 static")
    assert ("input_global_scale" in tensors) == (name == "NVFP4 inputs")
    (found,), read = FORMAT.decode(tensors, scheme)
    same(found, part)
    assert [t.sha256() for t in read] == [t.sha256() for t in transforms]


@pytest.mark.parametrize("name", SCHEMES)
def test_the_tensors_are_those_that_the_scheme_says(make, name):
    scheme = SCHEMES[name]
    _, _, tensors = stored(make, scheme)
    specs = FORMAT.tensors(scheme)
    assert {n: tuple(t.shape) for n, t in tensors.items()} == {n: spec.shape for n, spec in specs.items()}
    assert all(spec.dtype in (None, tensors[n].dtype) for n, spec in specs.items())
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert FORMAT.size_bytes(scheme, torch.float32) == size


@pytest.mark.parametrize("name", SCHEMES)
def test_a_damaged_tensor_is_named(make, name):
    scheme = SCHEMES[name]
    _, _, tensors = stored(make, scheme)
    for damaged, tensor in tensors.items():
        missing = {n: t for n, t in tensors.items() if n != damaged}
        with pytest.raises(KeyError, match=damaged):
            FORMAT.decode(missing, scheme)
        with pytest.raises(ValueError, match=f"{damaged} is .*, but it must be"):
            FORMAT.decode({**tensors, damaged: torch.cat([tensor, tensor])}, scheme)
        with pytest.raises(ValueError, match=damaged):
            FORMAT.decode({**tensors, damaged: tensor.to(torch.int16)}, scheme)


def test_a_shape_that_contradicts_the_model_is_an_error(make):
    part, _, tensors = stored(make, SCHEMES["W4A16 g32"])
    with pytest.raises(ValueError, match=r"weight_shape is \[6, 63\], but it must be \[6, 64\]"):
        FORMAT.decode({**tensors, "weight_shape": torch.tensor([6, 63])}, layer_of(part))


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
    assert FORMAT.schemes(json.loads(json.dumps(config)), shapes(*NAMES), {}) == schemes


def test_several_schemes_are_written_by_name_and_read_back():
    schemes = dict(zip(NAMES, list(SCHEMES.values())[3:7], strict=True)) | {"model.layers.1.b": SCHEMES["W8A8"]}
    config = FORMAT.config(schemes, ["model.layers.1.c"], "0.1")
    groups = list(config["config_groups"].values())
    assert [group["targets"] for group in groups] == [
        ["model.layers.0.a"],
        ["model.layers.0.b", "model.layers.1.b"],
        ["model.layers.1.a"],
        ["lm_head"],
    ]
    assert config["format"] == "mixed-precision"
    assert [g["format"] for g in groups] == ["pack-quantized", "int-quantized", "int-quantized", "pack-quantized"]
    assert (
        FORMAT.schemes(json.loads(json.dumps(config)), shapes(*NAMES, "model.layers.1.b", "model.layers.1.c"), {})
        == schemes
    )


def test_several_schemes_of_one_layout_name_that_layout():
    schemes = {"a": SCHEMES["W4A16 g32"], "b": SCHEMES["W3A16 channel"]}
    assert FORMAT.config(schemes, [], "0.1")["format"] == "pack-quantized"


def test_the_width_of_a_layer_makes_no_group_of_its_own():
    scheme = SCHEMES["W4A16 g32"]
    schemes = {"a": replace(scheme, shape=(6, 64)), "b": replace(scheme, shape=(8, 128))}
    assert len(FORMAT.config(schemes, [], "0.1")["config_groups"]) == 1


FP8_CACHE = GridCache(GRIDS["fp8_e4m3"], GRIDS["fp8_e4m3"], "static")


@pytest.mark.parametrize("schemes", [{}, {"a": SCHEMES["W4A16 g32"]}])
def test_a_quantized_cache_is_stated_as_its_owner_has_it_and_read_back(schemes):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = json.loads(
        json.dumps(FORMAT.state_cache(FORMAT.config(schemes, ["lm_head"], "0.1"), ["lm_head"], FP8_CACHE))
    )
    theirs = quantization.QuantizationConfig.model_validate(config).kv_cache_scheme
    assert (theirs.num_bits, theirs.type, theirs.strategy) == (8, "float", "tensor")
    assert theirs.symmetric and not theirs.dynamic
    assert FORMAT.read_cache(config) == FP8_CACHE
    assert FORMAT.read_cache(FORMAT.config({"a": SCHEMES["FP8"]}, [], "0.1")) is None


@pytest.mark.parametrize(
    "scheme",
    [
        GridCache(FP8_CACHE.keys, FP8_CACHE.values, "token"),
        GridCache(FP8_CACHE.keys, None, "static"),
        GridCache(INT8, INT8, "static"),
    ],
)
def test_other_cache_policies_are_not_stated(scheme):
    grouped = LlamaConfig(num_key_value_heads=4)
    assert FORMAT.states(FP8_CACHE, grouped) and not FORMAT.states(scheme, grouped)
    assert not FORMAT.states(FP8_CACHE, OPTConfig()), "compressed-tensors looks for num_key_value_heads"
    assert not FORMATS["native"].states(FP8_CACHE, grouped)


def test_without_compressed_layers_there_is_no_config():
    assert FORMAT.config({}, ["lm_head"], "0.1") is None


@pytest.mark.parametrize("name", [*SCHEMES, "mixed"])
def test_compressed_tensors_validates_the_config(name):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    schemes = dict(zip("abcdefghijklmnopq", SCHEMES.values(), strict=True)) if name == "mixed" else {"a": SCHEMES[name]}
    config = FORMAT.config(schemes, ["lm_head"], "0.1")
    theirs = quantization.QuantizationConfig.model_validate(json.loads(json.dumps(config)))
    assert theirs.quantization_status == "compressed"
    assert theirs.ignore == ["lm_head"]
    assert len(theirs.config_groups) == len(config["config_groups"]) == len(schemes)
    for scheme, group in zip(schemes.values(), theirs.config_groups.values(), strict=True):
        weights, inputs = group.weights, group.input_activations
        codes = scheme.codes
        kind = "int" if codes.grid.name.startswith("int") else "float"
        assert (weights.num_bits, weights.type, weights.symmetric) == (codes.grid.bits, kind, codes.symmetric)
        assert (weights.group_size or weights.strategy) == codes.group_size
        assert (inputs is None) == (scheme.rounding is None)
        if inputs is not None:
            wanted = {
                "static": ("tensor", False, None),
                "token": ("token", True, None),
                "group": ("group", True, 32),
                "local": ("tensor_group", "local", 16),
            }[scheme.rounding.scale]
            assert (inputs.strategy, inputs.dynamic, inputs.group_size) == wanted
            assert (inputs.num_bits, inputs.symmetric) == (scheme.rounding.grid.bits, True)


@pytest.mark.parametrize(
    "name", [name for name in SCHEMES if name not in ("FP8 weights", "W4AFP8")]
)  # it chooses the first for itself with inputs only; the second it leaves in bytes, where servers read words
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
        assert set(layout_of(scheme).tensors(scheme)) == set(names)


FP8 = GRIDS["fp8_e4m3"]


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (
            coded("int8", "channel", True, rounding("fp8_e4m3")),
            "activations fp8_e4m3 cannot be combined with these integer weights; use int8 (with symmetric int4 weights",
        ),
        (coded("int4", 32, False, rounding("fp8_e4m3")), "activations fp8_e4m3 cannot be combined with these integer"),
        (
            coded("nf4", 64),
            "weights nf4 have no layout; use int2 to int8, fp8_e4m3, mxfp4, mxfp8 or nvfp4, or format: native",
        ),
        (coded("fp4_e2m1"), "weights fp4_e2m1 have no layout"),
        (
            coded("fp8_e5m2", "channel"),
            "weights fp8_e5m2 have no reader; use fp8_e4m3, or format: native",
        ),
        (coded("fp8_e4m3", 64), "fp8_e4m3 has no layout with groups; use group_size: channel or tensor"),
        (coded("fp8_e4m3", "channel", True, rounding()), "fp8_e4m3 weights need activations none or fp8_e4m3"),
        (coded("mxfp4", 32, True, rounding()), "mxfp4 weights are read only with activations none or mxfp4;"),
        (coded("mxfp8", 32, True, rounding("fp8_e4m3")), "mxfp8 weights are read only with activations none or mxfp8;"),
        (
            coded("nvfp4", 16, True, rounding("nvfp4", scale="group", group=16)),
            "inputs nvfp4 with a global scale per token have no reader; use activation_scale: static",
        ),
        (coded("nvfp4", 16, True, rounding("fp8_e4m3")), "nvfp4 weights are read only with activations none or nvfp4;"),
        (coded("nvfp4", 16, indexed=True), "act_order: group has no reader for nvfp4; use act_order: static"),
        (coded("mxfp4", shape=(8, 80)), "mxfp4 has groups of 32 columns, which do not divide the 80 inputs"),
        (coded("nvfp4", 16, shape=(8, 72)), "nvfp4 has groups of 16 columns, which do not divide the 72 inputs"),
    ],
)
def test_what_has_no_reader_is_refused_with_what_has_one(scheme, message):
    assert FORMAT.refuses(scheme).startswith(message)


def test_a_layout_of_others_is_an_error():
    config = FORMAT.config({"a": SCHEMES["MXFP4"]}, [], "0.1")
    config["config_groups"]["group_0"]["format"] = "mxfp6-pack-quantized"
    with pytest.raises(ValueError, match="layout 'mxfp6-pack-quantized' of compressed-tensors cannot be read; known: "):
        FORMAT.schemes(config, shapes("a"), {})


def test_transformers_is_asked_to_multiply_out_what_it_would_run_wrongly():
    asked = {name: "run_compressed" in FORMAT.config({"a": scheme}, [], "0.1") for name, scheme in SCHEMES.items()}
    assert {name for name in SCHEMES if asked[name]} == {"W4A16 asymmetric", "MXFP4", "NVFP4", "MXFP8"}
    mixed = {"a": SCHEMES["MXFP4"], "b": SCHEMES["NVFP4"]}  # it multiplies out one scheme at most
    assert "run_compressed" not in FORMAT.config(mixed, [], "0.1")


def test_others_may_have_stored_bytes_for_byte_inputs_in_words(make, same):
    packed = make("int8", (6, 64), "channel")
    same(decoded(FORMAT, PackQuantized().encode(packed), SCHEMES["W8A8"]), packed)


def test_their_layer_has_a_place_for_the_static_scale():
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = FORMAT.config({"a": SCHEMES["W8A8 static"]}, [], "0.1")
    module = torch.nn.Sequential(torch.nn.Linear(64, 6))
    quantization.apply_quantization_config(module, quantization.QuantizationConfig.model_validate(config))
    assert module[0].get_parameter("input_scale").shape == FORMAT.tensors(SCHEMES["W8A8 static"])["input_scale"].shape


def test_activations_in_floats_are_refused():
    message = FORMAT.refuses(coded("int8", "channel", True, rounding("fp8_e4m3")))
    assert message.startswith("activations fp8_e4m3 cannot be combined with these integer weights; use int8 (with")
    static = coded("int4", 32, True, rounding("fp8_e4m3", scale="static"))
    assert FORMAT.refuses(static).startswith("a static scale of the inputs is stored only with int8 weights")


def test_what_the_packed_layout_refuses_is_refused():
    assert "use 20, 25, 50, 100, channel, or format: native" in FORMAT.refuses(coded("int8", 64, shape=(8, 100)))
    assert all(FORMAT.refuses(scheme) is None for scheme in SCHEMES.values())


def test_short_groups_are_adapted(make):
    packed = make("int4", (4, 96), 64)
    assert FORMAT.adapt_part(packed).group_size == 32
    assert FORMAT.adapt(layer_of(packed)).codes.group_size == 32


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([rounding(threshold=6.0)], "cannot state that outlier columns are computed in floats"),
        ([rounding(columns=True)], "cannot state that outlier columns are computed in floats"),
        ([SCALED, rounding()], "its inputs are divided by a scale that no layer before it could absorb"),
    ],
)
def test_what_has_no_word_in_the_format_is_refused_with_what_has(transforms, message):
    reason = FORMAT.refuses(coded("int8", "channel", True, *transforms))
    assert message in reason and "use format: native" in reason


def test_a_permutation_is_refused_with_what_to_do_instead():
    reason = FORMAT.refuses(coded("int8", "channel", True, PERMUTED, rounding()))
    assert "its inputs are permuted" in reason
    assert reason.endswith("use format: native, or unlinked: skip for the permutation")


def test_what_is_more_than_codes_is_refused():
    both = LayerScheme((6, 64), (*coded().parts, *LayerScheme((6, 64)).parts))
    assert FORMAT.refuses(both).endswith("holds only codes, not int4, group 32 + dense; use format: native")
    assert FORMAT.refuses(LayerScheme((6, 64), transforms=(rounding(),))).endswith("use format: native")
    assert FORMAT.refuses(LayerScheme((6, 64))) is None
    assert FORMAT.refuses(coded("int4", 32, False, float_zeros=True)).endswith("zero_point: integer, or format: native")


@pytest.mark.parametrize(("grid", "group_size"), [("int4", 32), ("int8", "tensor"), ("fp8_e4m3", "tensor")])
def test_a_static_scale_needs_a_layout_of_bytes(grid, group_size):
    inputs = "fp8_e4m3" if grid == "fp8_e4m3" else "int8"
    reason = FORMAT.refuses(coded(grid, group_size, True, rounding(inputs, scale="static")))
    if grid == "int4":
        assert "use activation_scale: token, or format: native" in reason
    else:
        assert reason is None


def test_targets_and_ignored_names_may_be_patterns():
    """As other writers state them; a name wins over a pattern, a pattern over the class, and ignored names over all."""
    first, second, third = coded(), coded("int8", "channel"), coded("int4", 64)
    config = FORMAT.config({"model.layers.0.a": first}, [], "0.0")
    groups = [FORMAT.config({"x": scheme}, [], "0.0")["config_groups"]["group_0"] for scheme in (first, second, third)]
    targets = ["model.layers.0.b"], ["Linear"], [r"re:.*layers\.\d\.[ab]$"]
    config["config_groups"] = {
        f"group_{i}": {**group, "targets": list(own)}
        for i, (group, own) in enumerate(zip(groups, targets, strict=True))
    }
    config["ignore"] = [r"re:.*layers\.1\..*"]
    found = FORMAT.schemes(config, shapes(*NAMES), {})
    wanted = {"model.layers.0.a": third, "model.layers.0.b": first, "lm_head": second}
    assert {name: scheme.parts for name, scheme in found.items()} == {n: s.parts for n, s in wanted.items()}


@pytest.mark.parametrize(("field", "value"), [("targets", ["re:(a"]), ("targets", [3]), ("ignore", ["re:*"])])
def test_a_pattern_that_is_none_is_an_error(field, value):
    config = FORMAT.config({"model.layers.0.a": coded()}, [], "0.0")
    holder = config if field == "ignore" else config["config_groups"]["group_0"]
    holder[field] = value
    with pytest.raises(ValueError, match="is no regular expression|accepted: a list of texts"):
        FORMAT.schemes(config, shapes(*NAMES), {})
