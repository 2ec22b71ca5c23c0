"""8-bit floats in blocks (DeepSeek): one scale per block of weights, one per token and group of inputs."""

import json

import pytest
import torch
from schemes import layer_of
from tolerances import LOGITS, layers_near, near_rounded
from transformers import AutoModelForCausalLM

import compress
from compress.checkpoint.formats.layouts.float_quantized import FloatQuantized
from compress.errors import TargetError
from compress.layers.parts.codes import CodesPart
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.inputs import round_inputs

GRID = GRIDS["fp8_e4m3"]
LAYOUT = FloatQuantized()
BLOCKS = {"weights": "fp8_e4m3", "group_size": 32, "block_rows": 32}
GROUPED = {**BLOCKS, "activations": "fp8_e4m3", "activation_scale": "group"}


def packed(shape, rows, columns, seed=0, dtype=torch.float32):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return CodesPart.of(quantize(weight, GRID, columns, dtype=dtype, rows=rows))


def test_scales_of_blocks_by_hand():
    """Blocks of 2 x 2; the third row is a block of its own. e4m3 ends at 448."""
    weight = torch.tensor([[1.0, -2.0, 0.5, 0.25], [0.0, 7.0, -1.0, 0.0], [3.0, 0.0, 0.0, 14.0]])
    codes = quantize(weight, GRID, 2, rows=2)
    wanted = torch.tensor([[7.0, 1.0], [7.0, 1.0], [3.0, 14.0]]) / 448
    assert torch.equal(codes.scale, wanted)
    part = CodesPart.of(codes)
    stored = LAYOUT.encode(part)
    assert torch.equal(stored["weight_scale"], wanted[[0, 2]])
    # 7, 1, 3 and 14 are the ends of their blocks, so they are exact; 2 / 7 * 448 = 128 is a power of two
    assert part.dense(torch.float32)[[0, 1, 1, 2, 2], [1, 1, 2, 0, 3]].tolist() == [-2.0, 7.0, -1.0, 3.0, 14.0]


@pytest.mark.parametrize("search", ["mse", "absmax"])
def test_a_block_is_fitted_as_one_group_of_its_weights(search):
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    codes = quantize(weight, GRID, 3, search=search, rows=2)
    for top, left in ((0, 0), (2, 3), (4, 0)):
        alone = weight[top : top + 2, left : left + 3].reshape(1, -1)
        wanted = quantize(alone, GRID, "channel", search=search).scale.item()
        assert codes.scale[top, left // 3].item() == wanted


@pytest.mark.parametrize(
    ("shape", "rows", "columns"), [((64, 64), 32, 32), ((50, 96), 32, 32), ((7, 12), 4, 6), ((3, 8), 128, 4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layout_is_exact_and_its_owner_reads_the_same_weight(shape, rows, columns, dtype):
    part = packed(shape, rows, columns, dtype=dtype)
    tensors, scheme = LAYOUT.encode(part), layer_of(part)
    assert tensors["weight_scale"].shape == (-(-shape[0] // rows), shape[1] // columns)
    assert {name: (tuple(t.shape)) for name, t in tensors.items()} == {
        name: spec.shape for name, spec in LAYOUT.tensors(scheme).items()
    }
    again = LAYOUT.decode(tensors, scheme)
    assert again.scheme == part.scheme and torch.equal(again.scale, part.scale) and torch.equal(again.words, part.words)
    quantization = pytest.importorskip("compressed_tensors.quantization")
    base = pytest.importorskip("compressed_tensors.compressors.base")
    arguments = quantization.QuantizationArgs(**LAYOUT.weight_arguments(scheme))
    theirs = quantization.QuantizationScheme(targets=["Linear"], weights=arguments, format=LAYOUT.name)
    read = base.BaseCompressor.get_value_from_registry(LAYOUT.name).decompress(tensors, theirs)["weight"]
    assert torch.equal(read, part.dense(dtype))


def test_inputs_have_a_scale_per_token_and_group():
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    x[..., 4:] *= 1000
    found = round_inputs(x, GRID, group=4)
    for part in (slice(0, 4), slice(4, 8)):
        assert torch.equal(found[..., part], round_inputs(x[..., part], GRID))
    assert not torch.equal(found[..., :4], round_inputs(x, GRID)[..., :4])


@pytest.fixture(scope="module")
def result(recipe, tmp_path_factory):
    pytest.importorskip("compressed_tensors")
    return compress.run(recipe(compress.RTN(**GROUPED, ignore="lm_head")), tmp_path_factory.mktemp("blocks") / "out")


def test_transformers_computes_the_same(result):
    verified = result.report["verified"]
    assert verified["own"] <= LOGITS and verified["transformers"] is not None and verified["layers"] == 21
    [group] = json.loads((result.folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert (group["weights"]["strategy"], group["weights"]["block_structure"]) == ("block", [32, 32])
    inputs = group["input_activations"]
    assert (inputs["strategy"], inputs["group_size"], inputs["dynamic"]) == ("group", 32, True)
    ours, theirs = compress.load(result.folder)[0], AutoModelForCausalLM.from_pretrained(result.folder)
    ids = torch.arange(48)[None]
    with torch.no_grad():
        assert near_rounded(theirs.eval()(input_ids=ids).logits, ours(input_ids=ids).logits)
    assert layers_near(theirs, ours, ids)
    layer = ours.model.layers[0].mlp.up_proj
    assert (layer.rounding.scheme.group, layer.codes.scheme.rows, layer.codes.group_size) == (32, 32, 32)


def test_the_native_format_holds_blocks_of_any_grid(recipe, tmp_path):
    step = compress.RTN(weights="int8", group_size=32, block_rows=64, activations="int8", activation_scale="group")
    report = compress.run(recipe(step, save={"format": "native"}), tmp_path / "out").report
    assert report["verified"]["own"] <= LOGITS
    assert compress.load(tmp_path / "out")[0].model.layers[0].mlp.up_proj.codes.scheme.rows == 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_rows": 32, "group_size": "tensor"}, "block_rows needs a group_size in columns"),
        (
            {"block_rows": 32, "weights": "mxfp4"},
            "block_rows is not possible with weights mxfp4, whose groups are fixed",
        ),
        (
            {"activation_scale": "group"},
            "activation_scale: group needs rounded inputs; write activations: fp8_e4m3, or leave",
        ),
        (
            {"activation_scale": "group", "activations": "int8", "group_size": "channel"},
            "activation_scale: group needs a group_size in columns",
        ),
    ],
)
def test_options_that_have_no_blocks(options, message):
    with pytest.raises(ValueError, match=message):
        compress.RTN(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weights": "int8", "group_size": 32, "block_rows": 32},
            "blocks of weights are stored only with fp8_e4m3; use",
        ),
        (
            {**BLOCKS, "group_size": "channel"},
            "whole rows that share a scale have no layout; use a group_size in columns, or format: native",
        ),
        (
            {"weights": "fp8_e4m3", "group_size": 32},
            r"no layout with groups; .*blocks \(block_rows of rtn\)",
        ),
        (
            {**GROUPED, "block_rows": 1},
            "inputs per group is stored only with blocks of fp8_e4m3 weights; add block_rows",
        ),
        (
            {**BLOCKS, "group_size": 40},
            "blocks of 40 columns do not divide its 128 inputs; use a group_size that divides",
        ),
        (
            {**GROUPED, "group_size": 40},
            "groups of 40 columns do not divide its 128 inputs; use activation_scale: token",
        ),
    ],
)
def test_what_no_reader_supports(recipe, options, message):
    with pytest.raises(TargetError, match=message):
        compress.plan(recipe(compress.RTN(**options)))


def test_training_keeps_the_scales_of_blocks():
    """A trained scale per row would not be one of its block."""
    assert packed((4, 4), 2, 2).free_scale is None and packed((4, 4), 1, 2).free_scale is not None
