"""bitsandbytes: LLM.int8, nf4 and fp4, with and without double quantization: exact both ways, and by hand."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes import PERMUTED, coded, decoded, encoded, layer_of, rounding

from compress.checkpoint.formats import FORMATS
from compress.layers.parts.codes import CodesPart
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.codes import Codes
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.scales import dynamic_levels

FORMAT = FORMATS["bitsandbytes"]
FLOATS = ["nf4", "nf4_bnb_dq", "fp4_bnb", "fp4_bnb_dq"]
INT8 = GRIDS["int8"]


def stored_shapes(name, tensors):
    return {f"{name}.{key}": tuple(tensor.shape) for key, tensor in tensors.items()}


def read_again(part, inputs=None, storage=torch.bfloat16):
    """The part from its tensors and its config, as a reader has them."""
    form = FORMAT.stored_in(storage)
    scheme = layer_of(part, inputs)
    assert form.refuses(scheme) is None
    tensors = encoded(form, part, inputs)
    specs = form.tensors(scheme)
    assert {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()} == {
        n: (s.shape, s.dtype) for n, s in specs.items()
    }
    config = json.loads(json.dumps(form.config({"a": scheme}, ["b"], "1")))
    shapes = {"a": part.shape, "b": part.shape}
    read = FORMAT.of_config(config).schemes(config, shapes, stored_shapes("a", tensors))
    assert read == {"a": form.adapt(scheme)}
    return decoded(FORMAT, tensors, read["a"])


@settings(max_examples=60)
@given(
    grid=st.sampled_from(FLOATS),
    rows=st.integers(1, 40),
    groups=st.integers(1, 9),
    group_size=st.sampled_from([32, 64]),
    seed=st.integers(0, 999),
    storage=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_4_bit_weights_read_back_as_they_were(make, same, grid, rows, groups, group_size, seed, storage):
    part = make(grid, (rows, groups * group_size), group_size, True, seed)
    same(read_again(FORMAT.adapt_part(part), storage=storage), part)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 40),
    size=st.sampled_from(["channel", "tensor"]),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_8_bit_weights_read_back_as_they_were(make, same, rows, width, size, seed, dtype):
    part = make("int8", (rows, width), size, True, seed, dtype).in_storage(torch.float32)
    stored = FORMAT.adapt_part(part)
    assert torch.equal(stored.codes().codes, part.codes().codes)
    assert torch.allclose(stored.scale, part.scale.expand(rows, 1), rtol=2**-22, atol=0)
    same(read_again(stored, INT8), stored)
    if dtype != torch.float32:  # a 16-bit scale times 127 is exact in float32
        assert torch.equal(stored.scale, part.scale.expand(rows, 1))


def test_the_first_code_is_in_the_high_half_and_nf4_codes_are_sorted():
    grid, codes = GRIDS["nf4"], torch.arange(32, dtype=torch.uint8).view(1, 32) % 16
    part = CodesPart.of(Codes(codes, torch.tensor([[2.0]]), None, grid, 32))
    tensors = encoded(FORMAT, part)
    assert tensors["weight"].shape == (16, 1)
    assert tensors["weight"].flatten().tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF] * 2
    assert tensors["weight.absmax"].tolist() == [2.0]
    assert tensors["weight.quant_map"].tolist() == [pytest.approx(v) for v in grid.levels]
    text = bytes(tensors["weight.quant_state.bitsandbytes__nf4"].tolist()).decode()
    assert json.loads(text) == {"quant_type": "nf4", "blocksize": 32, "dtype": "float32", "shape": [1, 32]}


def test_fp4_codes_are_bit_patterns():
    """Sign, two bits of exponent and one of mantissa; the values in the order of the patterns, over 12."""
    values = [0, 0.0625, 8, 12, 4, 6, 2, 3]
    grid = GRIDS["fp4_bnb"]
    weight = torch.tensor([v / 12 for v in (*values, *(-v for v in values))] * 2).view(1, 32)
    codes = grid.encode(weight, torch.ones(1, 1), None).to(torch.uint8)
    tensors = encoded(FORMAT, CodesPart.of(Codes(codes, torch.ones(1, 1), None, grid, 32)))
    halves = [half for byte in tensors["weight"].flatten().tolist() for half in (byte >> 4, byte & 15)]
    assert halves == [0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15] * 2  # 8 is a second zero
    table = tensors["weight.quant_map"]
    assert torch.equal(table[torch.tensor(halves)], weight[0])


def test_both_zeros_of_fp4_are_read(make):
    part = make("fp4_bnb", (2, 32), 32)
    tensors = encoded(FORMAT, part)
    tensors["weight"][:, 0] = 0x08
    assert decoded(FORMAT, tensors, layer_of(part)).dense(torch.float32).count_nonzero() == 0


def test_scales_of_double_quantization_by_hand(make):
    part = make("nf4_bnb_dq", (40, 64), 64)
    tensors = encoded(FORMAT, part)
    state = json.loads(bytes(tensors["weight.quant_state.bitsandbytes__nf4"].tolist()).decode())
    assert (state["nested_blocksize"], state["nested_dtype"]) == (256, "float32")
    table, extent = tensors["weight.nested_quant_map"], tensors["weight.nested_absmax"]
    assert table.shape == (256,) and extent.shape == (1,)
    absmax = table[tensors["weight.absmax"].long()] * extent + state["nested_offset"]
    assert torch.equal(absmax.view(40, 1), part.scales())


def test_the_dynamic_numbers():
    levels = dynamic_levels()
    assert levels.shape == (256,) and bool((levels.diff() > 0).all())
    assert levels[127] == 0 and levels[-1] == 1 and levels[0] == pytest.approx(-0.9929688)
    assert [int((levels.abs() > 10.0**-i).sum()) for i in range(1, 7)] == [129, 193, 225, 241, 249, 253]


def test_8_bit_weights_by_hand():
    codes = torch.tensor([[127, -128, 3], [0, 1, -1]], dtype=torch.int8)
    part = CodesPart.of(Codes(codes, torch.tensor([[0.5], [2.0]]), None, INT8, "channel"))
    tensors = encoded(FORMAT, part, INT8)
    assert torch.equal(tensors["weight"], codes)
    assert tensors["SCB"].tolist() == [63.5, 254.0] and tensors["SCB"].dtype == torch.float32
    assert (tensors["weight_format"].item(), tensors["weight_format"].shape) == (0, ())


@pytest.mark.parametrize("threshold", [None, 6.0, 4.5])
def test_the_threshold_of_outliers_is_in_the_config(threshold):
    scheme = coded("int8", "channel", True, rounding(threshold=threshold), shape=(4, 8))
    config = FORMAT.config({"a": scheme}, ["lm_head"], "1")
    assert config["llm_int8_threshold"] == (threshold or 0.0) and config["load_in_8bit"]
    stored = {f"a.{name}": spec.shape for name, spec in FORMAT.tensors(scheme).items()}
    assert FORMAT.schemes(config, {"a": (4, 8), "lm_head": (4, 8)}, stored) == {"a": scheme}


def test_the_config_states_4_bits():
    config = FORMAT.stored_in(torch.bfloat16).config({"a": coded("nf4_bnb_dq", 64)}, ["lm_head"], "1")
    assert (config["load_in_4bit"], config["load_in_8bit"]) == (True, False)
    assert (config["bnb_4bit_quant_type"], config["bnb_4bit_use_double_quant"]) == ("nf4", True)
    assert (config["bnb_4bit_compute_dtype"], config["llm_int8_skip_modules"]) == ("bfloat16", ["lm_head"])


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (coded("int4"), "holds weights int8, nf4, nf4_bnb_dq, fp4_bnb, fp4_bnb_dq, not int4"),
        (coded("nf4_dq"), "not nf4_dq"),
        (coded("nf4", 16), "no blocks of 16 columns for 64 inputs; use 32, 64, or format: native"),
        (coded("nf4", "channel"), "no blocks of channel columns"),
        (coded("nf4", 64, shape=(6, 80)), "no blocks of 64 columns for 80 inputs; use format: native"),
        (
            coded("nf4", 32, True, rounding()),
            "bitsandbytes with 4-bit weights cannot state that activations are rounded",
        ),
        (coded("int8", "channel"), "use the pass llm_int8, or activations: int8"),
        (coded("int8", "channel", True, rounding(columns=True)), "use the pass llm_int8"),
        (coded("int8", 32, True, rounding()), "use group_size: channel and symmetric: true"),
        (coded("int8", "channel", False, rounding()), "use group_size: channel and symmetric: true"),
        (coded("nf4", 32, True, PERMUTED), "format bitsandbytes cannot state this"),
        (LayerScheme((6, 64), (coded().parts[0], coded().parts[0])), "holds only codes"),
    ],
)
def test_what_it_cannot_hold_is_refused_with_what_to_write(scheme, words):
    assert words in FORMAT.refuses(scheme)


def test_all_layers_share_grid_and_threshold():
    low, high = (coded("int8", "channel", True, rounding(threshold=t)) for t in (5.0, 6.0))
    assert FORMAT.clash({"a": coded("nf4"), "b": coded("nf4", 64)}) is None
    assert "one grid for all layers, not fp4_bnb, nf4;" in FORMAT.clash({"a": coded("nf4"), "b": coded("fp4_bnb")})
    assert "not several thresholds" in FORMAT.clash({"a": low, "b": high})


def damaged(make, name):
    part = make("nf4_bnb_dq", (4, 64), 64)
    tensors, state = encoded(FORMAT, part), "weight.quant_state.bitsandbytes__nf4"
    text = bytes(tensors[state].tolist()).decode()
    if name == "json":
        tensors[state] = tensors[state][:20]
    elif name == "shape":
        tensors[state] = torch.tensor(list(text.replace("[4, 64]", "[8, 64]").encode()), dtype=torch.uint8)
    elif name == "offset":
        tensors[state] = torch.tensor(list(text.replace("nested_offset", "nested_offsex").encode()), dtype=torch.uint8)
    elif name == "map":
        tensors["weight.quant_map"] = tensors["weight.quant_map"].flip(0)
    elif name == "nested":
        tensors["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
    elif name == "bytes":
        tensors["weight"] = tensors["weight"][:-1]
    return tensors, layer_of(part)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("json", "bitsandbytes__nf4 cannot be read"),
        ("shape", r"states shape, blocksize and nested_blocksize \(\(8, 64\), 64, 256\), but they must be"),
        ("offset", "cannot be read .*nested_offset"),
        ("map", "weight.quant_map holds other values"),
        ("nested", "weight.nested_quant_map holds other values"),
        ("bytes", r"weight is torch.uint8 \[127, 1\]"),
    ],
)
def test_a_damaged_layer_is_named(make, name, words):
    with pytest.raises(ValueError, match=words):
        decoded(FORMAT, *damaged(make, name))


def test_missing_tensors_and_other_row_formats_are_named(make):
    tensors, scheme = damaged(make, "")
    with pytest.raises(KeyError, match=r"weight\.absmax"):
        decoded(FORMAT, {k: v for k, v in tensors.items() if k != "weight.absmax"}, scheme)
    part = FORMAT.adapt_part(make("int8", (4, 8), "channel"))
    eight = encoded(FORMAT, part, INT8)
    with pytest.raises(ValueError, match="weight_format is not 0"):
        decoded(FORMAT, {**eight, "weight_format": torch.tensor(2, dtype=torch.uint8)}, layer_of(part, INT8))


def test_blocks_that_cross_rows_are_not_read():
    stored = {"a.weight.quant_state.bitsandbytes__nf4": (80,), "a.weight.absmax": (6,)}
    with pytest.raises(ValueError, match="a has 6 blocks for 4 x 96 weights; only blocks inside of rows are read"):
        FORMAT.schemes({}, {"a": (4, 96)}, stored)
