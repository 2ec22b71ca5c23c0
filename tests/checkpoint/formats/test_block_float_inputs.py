"""Quantized inputs of NVFP4, MXFP4 and MXFP8: the numbers of compressed-tensors, stored and read back."""

import json

import pytest
import torch
from schemes import coded, rounding

from compress.checkpoint.formats import FORMATS
from compress.checkpoint.formats.layouts.pack_quantized import input_arguments
from compress.layers.parts.codes import CodesPart
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS

FORMAT = FORMATS["compressed-tensors"]
SHAPE = (6, 128)
INPUTS = {
    "nvfp4": rounding("nvfp4", scale="local", group=16),
    "mxfp4": rounding("mxfp4", scale="group", group=32),
    "mxfp8": rounding("mxfp8", scale="group", group=32),
}
LAYOUTS = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}


def scheme_of(name):
    """A layer whose weights and inputs are on the same grid."""
    return coded(name, GRIDS[name].group_size, True, INPUTS[name], shape=SHAPE)


def inputs_of(name, dtype, spread=8.0, seed=0):
    """Inputs with outlier channels and a token of zeros, and their quantizer; its global scale covers half of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 9, SHAPE[1], generator=generator) * torch.exp2(
        spread * torch.rand(SHAPE[1], generator=generator)
    )
    x[0, 0] = 0
    x = x.to(dtype)
    scheme = INPUTS[name]
    top = x.abs().max() / 2 if scheme.scale == "local" else None
    return x, InputRounding.local(scheme, top) if scheme.scale == "local" else InputRounding(scheme, (0, 0), {})


def their_inputs(name, x, quantizer):
    """The inputs as compressed-tensors quantizes and dequantizes them."""
    package = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    module = torch.nn.Linear(SHAPE[1], 1)
    module.quantization_status = package.QuantizationStatus.FROZEN
    if quantizer.shared is not None:
        module.input_global_scale = torch.nn.Parameter(quantizer.shared, requires_grad=False)
    arguments = package.QuantizationArgs(**input_arguments(scheme_of(name)))
    return forward.forward_quantize(module, x, "input", arguments)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_in_float32_are_those_of_compressed_tensors(name, seed):
    x, quantizer = inputs_of(name, torch.float32, spread=4.0 * seed, seed=seed)
    assert torch.equal(quantizer(x), their_inputs(name, x, quantizer))


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_in_bfloat16_differ_at_most_where_they_round_the_scale_first(name):
    x, quantizer = inputs_of(name, torch.bfloat16)
    ours, theirs = quantizer(x), their_inputs(name, x, quantizer)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    if name != "nvfp4":
        assert torch.equal(ours, theirs)
        return
    # they round the scales of groups to bfloat16 before they code them; servers compute them in float32
    extent = x.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    coded_scale = ((extent / 6) * quantizer.shared).clamp(max=448).to(torch.float8_e4m3fn).float()
    scale = torch.where(coded_scale == 0, 0.125, coded_scale) / quantizer.shared
    codes = GRIDS["nvfp4"].encode(x.unflatten(-1, (-1, 16)).float(), scale, None)
    assert torch.equal(GRIDS["nvfp4"].decode(codes, scale, None).to(x.dtype).flatten(-2), theirs)
    groups = (ours == theirs).unflatten(-1, (-1, 16)).all(-1).float().mean()
    assert groups > 0.9
    exact = x.float()
    assert (ours - exact).square().sum() <= (theirs - exact).square().sum() * 1.001


def test_inputs_in_float16_have_no_scale_that_underflows():
    x, quantizer = inputs_of("mxfp8", torch.float16)
    tiny = x * 2.0**-20
    assert quantizer(tiny).isfinite().all()
    assert (quantizer(tiny).float() - tiny.float()).abs().max() <= 2.0**-4 * tiny.abs().max()


def test_a_global_scale_by_hand():
    scheme = INPUTS["nvfp4"]
    quantizer = InputRounding.local(scheme, torch.tensor(6.0))
    assert quantizer.shared.tolist() == [448.0]
    x = torch.zeros(1, 32)
    x[0, :3], x[0, 16:18] = torch.tensor([6.0, 2.6, -0.2]), torch.tensor([12.0, 3.0])
    # the second group would need the scale 2, that is 896 of 448: it saturates at 1, and its values at 6
    assert quantizer(x)[0, :3].tolist() == [6.0, 3.0, 0.0]
    assert quantizer(x)[0, 16:18].tolist() == [6.0, 3.0]
    assert InputRounding.local(scheme, None).shared.tolist() == [1.0]


@pytest.mark.parametrize("name", INPUTS)
def test_the_checkpoint_is_that_of_their_compressor(name):
    presets = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils")
    base = pytest.importorskip("compressed_tensors.compressors.base")
    grid, inputs = GRIDS[name], INPUTS[name]
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.1
    theirs = presets.preset_name_to_scheme(name.upper(), ["Linear"])
    groups, state = weight.unflatten(-1, (-1, grid.group_size)), {"weight": weight}
    quantizer = InputRounding(inputs, SHAPE, {})
    if name == "nvfp4":
        state["weight_global_scale"] = helpers.generate_gparam(weight.min(), weight.max())
        state["input_global_scale"] = helpers.generate_gparam(torch.tensor(-3.0), torch.tensor(7.0))
        quantizer = InputRounding.local(inputs, torch.tensor(7.0))
    ranges = groups.amin(-1), groups.amax(-1)
    state["weight_scale"], _ = helpers.calculate_qparams(*ranges, theirs.weights, state.get("weight_global_scale"))
    compressed = base.BaseCompressor.get_value_from_registry(LAYOUTS[name]).compress(state, theirs)
    part, scheme = CodesPart.of(quantize(weight, grid, grid.group_size)), scheme_of(name)
    tensors = FORMAT.encode(scheme, [part], [quantizer])
    assert tensors.keys() == compressed.keys()
    for key, tensor in tensors.items():
        assert tensor.dtype == compressed[key].dtype and torch.equal(tensor, compressed[key]), key
    (decoded,), (read,) = FORMAT.decode(compressed, scheme)
    assert decoded.sha256() == part.sha256() and read.tensors().keys() == quantizer.tensors().keys()
    assert all(torch.equal(tensor, quantizer.tensors()[key]) for key, tensor in read.tensors().items())


def stated(name):
    """The config of a layer as JSON, and its group."""
    config = json.loads(json.dumps(FORMAT.config({"a": scheme_of(name)}, [], "0.1")))
    return config, config["config_groups"]["group_0"]


@pytest.mark.parametrize("name", INPUTS)
def test_the_config_says_what_their_preset_says(name):
    presets = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    package = pytest.importorskip("compressed_tensors.quantization")
    theirs, (_, group) = presets.preset_name_to_scheme(name.upper(), ["Linear"]), stated(name)
    ours = package.QuantizationScheme(
        targets=["Linear"], **{key: group[key] for key in ("weights", "input_activations")}
    )
    for part in ("weights", "input_activations"):
        written, wanted = getattr(ours, part), getattr(theirs, part)
        keys = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "scale_dtype")
        assert {key: getattr(written, key) for key in keys} == {key: getattr(wanted, key) for key in keys}


@pytest.mark.parametrize("name", INPUTS)
def test_the_config_of_their_presets_is_read(name):
    presets = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    config, group = stated(name)
    theirs = json.loads(presets.preset_name_to_scheme(name.upper(), ["Linear"]).model_dump_json())
    group |= {key: theirs[key] for key in ("weights", "input_activations")}
    assert FORMAT.schemes(config, {"a": SHAPE}, {}) == {"a": scheme_of(name)}


def test_a_global_scale_of_earlier_versions_states_no_dtype():
    config, group = stated("nvfp4")
    del group["input_activations"]["scale_dtype"]
    assert FORMAT.schemes(config, {"a": SHAPE}, {}) == {"a": scheme_of("nvfp4")}


# Bad input


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("nvfp4", {"group_size": 32}, "input_activations.group_size = 32 is not read; accepted: 16"),
        ("nvfp4", {"strategy": "group"}, "input_activations.strategy = 'group' is not read; accepted: tensor_group"),
        ("nvfp4", {"num_bits": 8}, "input_activations.num_bits = 8 is not read; accepted: 4"),
        (
            "nvfp4",
            {"scale_dtype": "torch.uint8"},
            "scale_dtype = 'torch.uint8' is not read; accepted: null, torch.float8",
        ),
        ("nvfp4", {"dynamic": True}, "input_activations.type = 'float' is not read; accepted: int"),
        ("nvfp4", {"symmetric": False}, "input_activations.symmetric = False is not read; accepted: True"),
        ("mxfp4", {"dynamic": False}, "input_activations.dynamic = False is not read; accepted: True"),
        ("mxfp8", {"group_size": 64}, "input_activations.group_size = 64 is not read; accepted: 32"),
        ("mxfp8", {"scale_dtype": "torch.float8_e4m3fn"}, "scale_dtype = 'torch.float8_e4m3fn' is not read"),
        ("mxfp8", {"scale_dtype": "torch.int8"}, "scale_dtype = 'torch.int8' is not read"),
        ("mxfp4", {"dynamic": "global"}, "dynamic = 'global' is not read; accepted: True, False, local"),
    ],
)
def test_other_inputs_are_refused_by_their_key(name, changed, message):
    config, group = stated(name)
    group["input_activations"] |= changed
    with pytest.raises(ValueError, match=message):
        FORMAT.schemes(config, {"a": SHAPE}, {})


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_global_scale_is_positive_and_finite(value):
    quantizer = InputRounding(INPUTS["nvfp4"], SHAPE, {"shared": torch.tensor([value])})
    with pytest.raises(
        ValueError, match="input_global_scale (is .*, but it must be positive|holds a number that is not)"
    ):
        quantizer.validate("input")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale": "local"}, "number of columns"),
        ({"scale": "local", "group": 32, "grid": "mxfp4"}, "the scales of mxfp4 share no number"),
    ],
)
def test_a_scheme_without_sense(fields, message):
    with pytest.raises(ValueError, match=message):
        rounding(fields.pop("grid", "nvfp4"), **fields).check()
