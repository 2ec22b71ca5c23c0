"""GPTQ: exact both ways, by hand, both versions of zero points, and what must not be read."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes import SCALED, coded, decoded, encoded, layer_of, rounding

from compress.checkpoint.formats import FORMATS
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.bits import pack, unpack

FORMAT = FORMATS["gptq"]
BITS = {"int2": 2, "int3": 3, "int4": 4, "int8": 8}


def words(tensor):
    """Words without a sign."""
    return [word & 0xFFFFFFFF for word in tensor.flatten().tolist()]


def stored_shapes(name, tensors):
    return {f"{name}.{key}": tuple(tensor.shape) for key, tensor in tensors.items()}


def part_of(codes, scale, zero=None, grid="int4", group_size=32, index=None):
    """Codes (signed) [out, in] with scales [out, groups]."""
    scheme = coded(grid, group_size, zero is None, indexed=index is not None).codes
    bits = scheme.grid.bits
    words = pack((codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8), bits)
    held = {"words": words, "scale": scale.half(), "zero": zero, "group_index": index}
    return CodesPart(scheme, tuple(codes.shape), held)


@settings(max_examples=60)
@given(
    grid=st.sampled_from(list(BITS)),
    rows=st.integers(1, 3),
    groups=st.integers(1, 4),
    group_size=st.sampled_from(["channel", "tensor", 16, 32, 64]),
    symmetric=st.booleans(),
    indexed=st.booleans(),
    seed=st.integers(0, 999),
)
def test_what_is_stored_reads_back_as_it_was(make, same, grid, rows, groups, group_size, symmetric, indexed, seed):
    size = group_size if isinstance(group_size, int) else 32
    shape = (32 * rows, max(groups * size // 32 * 32, 32))
    part = make(grid, shape, group_size, symmetric, seed, torch.float16)
    if indexed and isinstance(group_size, int):
        index = torch.arange(shape[1]) // group_size
        order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(seed))
        part = part.changed(replace(part.scheme, indexed=True), group_index=index[order].int())
    scheme = layer_of(part)
    assert FORMAT.refuses(scheme) is None
    stored, before = FORMAT.adapt_part(part), part.dense(torch.float32)
    assert FORMAT.adapt(scheme) == layer_of(stored)
    assert torch.equal(stored.dense(torch.float32), before.expand(shape))
    tensors = encoded(FORMAT, stored)
    config = json.loads(json.dumps(FORMAT.config({"a": layer_of(stored)}, [], "1")))
    read = FORMAT.of_config(config).schemes(config, {"a": shape}, stored_shapes("a", tensors))["a"]
    assert read == layer_of(stored)
    same(decoded(FORMAT.of_config(config), tensors, read), stored)
    specs = FORMAT.tensors(read)
    assert {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()} == {
        n: (s.shape, s.dtype) for n, s in specs.items()
    }


@pytest.mark.parametrize(("grid", "zero_word"), [("int2", 0x55555555), ("int4", 0x77777777), ("int8", 0x7F7F7F7F)])
def test_codes_run_down_the_inputs_and_symmetric_zeros_are_stored_minus_one(grid, zero_word):
    bits = BITS[grid]
    codes = (torch.arange(32).repeat(32, 1) % 2**bits - 2 ** (bits - 1)).to(torch.int8)
    tensors = encoded(FORMAT, part_of(codes, torch.ones(32, 1), grid=grid))
    assert set(words(tensors["qzeros"])) == {zero_word}
    first = {"int2": 0xE4E4E4E4, "int4": 0x76543210, "int8": 0x03020100}[grid]
    assert words(tensors["qweight"])[0] == first
    assert tensors["qweight"].shape == (bits, 32) and tensors["g_idx"].tolist() == [0] * 32


def test_three_bits_cross_words_as_ten_one_ten_one_ten():
    codes = torch.zeros(32, 32, dtype=torch.int8) - 4
    codes[:, 10], codes[:, 21] = 3, 3  # 7 in three bits: two words share each of these codes
    tensors = encoded(FORMAT, part_of(codes, torch.ones(32, 1), grid="int3"))
    assert [word & 0xFFFFFFFF for word in tensors["qweight"][:, 0].tolist()] == [3 << 30, 1 | 1 << 31, 3]


def test_zero_points_are_stored_as_they_are_so_that_a_zero_point_of_zero_borrows_from_no_field():
    zero = (torch.arange(32) % 16 - 8).to(torch.int8)[:, None]
    part = part_of(torch.zeros(32, 32, dtype=torch.int8), torch.ones(32, 1), zero)
    tensors = encoded(FORMAT, part)
    assert words(tensors["qzeros"])[:2] == [0x76543210, 0xFEDCBA98]
    config = FORMAT.config({"a": layer_of(part)}, [], "1")
    assert (config["checkpoint_format"], config["sym"]) == ("gptq_v2", False)


def test_the_first_version_of_zero_points_is_read_field_by_field(same):
    """What AutoGPTQ writes: every zero point minus one, modulo 16."""
    zero = (torch.arange(32) % 16 - 8).to(torch.int8)[:, None]
    part = part_of(torch.zeros(32, 32, dtype=torch.int8), torch.ones(32, 1), zero)
    tensors = encoded(FORMAT, part)
    fields = unpack(tensors["qzeros"], 4, 32)
    tensors["qzeros"] = pack((fields.to(torch.int16) - 1) & 15, 4)
    assert words(tensors["qzeros"])[0] == 0x6543210F
    old = FORMAT.of_config({"checkpoint_format": "gptq"})
    same(decoded(old, tensors, layer_of(part)), part)


@pytest.mark.parametrize("stated", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("word", [0x77777777, 0x88888888])
def test_symmetric_zero_points_are_known_whatever_version_the_config_states(stated, word):
    part = part_of(torch.zeros(32, 32, dtype=torch.int8), torch.ones(32, 1))
    tensors = encoded(FORMAT, part)
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], word - (1 << 32) if word >> 31 else word)
    found = decoded(FORMAT.of_config({"checkpoint_format": stated}), tensors, layer_of(part))
    assert found.zero is None and torch.equal(found.words, part.words)


def test_a_layer_with_other_options_than_most_is_listed(make):
    many = {f"model.layers.{i}.a": coded("int4", 32, shape=(32, 64)) for i in range(3)}
    odd = {
        "model.layers.0.b": coded("int8", "channel", shape=(32, 64)),
        "model.layers.1.b": coded("int4", 32, shape=(32, 64), indexed=True),
    }
    config = FORMAT.config(many | odd, ["lm_head", "model.layers.0.c"], "1")
    assert (config["bits"], config["group_size"], config["desc_act"]) == (4, 32, False)
    assert config["dynamic"] == {
        r"+:^model\.layers\.0\.b(\.|$)": {"bits": 8, "group_size": -1},
        r"+:^model\.layers\.1\.b(\.|$)": {"desc_act": True},
        r"-:^model\.layers\.0\.c$": {},
    }
    assert config["modules_in_block_to_quantize"] == [["a", "b"]]
    stored = {
        f"{name}.{key}": spec.shape
        for name, scheme in (many | odd).items()
        for key, spec in FORMAT.tensors(scheme).items()
    }
    shapes = dict.fromkeys([*many, *odd, "lm_head", "model.layers.0.c"], (32, 64))
    assert FORMAT.schemes(config, shapes, stored) == many | odd


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (coded("int5", 32, shape=(32, 64)), "holds weights int2, int3, int4, int8, not int5"),
        (coded("nf4", 32, shape=(32, 64)), "not nf4"),
        (coded("int4", 24, shape=(32, 96)), "no groups of 24 columns for 96 inputs; use 16, 32, channel"),
        (coded("int4", 64, shape=(32, 96)), "no groups of 64 columns for 96 inputs"),
        (coded("int4", "channel", shape=(24, 64)), "units of 32 rows and columns, not 24 x 64"),
        (coded("int4", 32, True, rounding(), shape=(32, 64)), "cannot state that activations are rounded"),
        (coded("int4", 32, True, SCALED, shape=(32, 64)), "format gptq cannot state this"),
        (coded("int4", 32, False, shape=(32, 64), float_zeros=True), "zero_point: integer"),
        (LayerScheme((32, 64), (coded().parts[0], coded().parts[0])), "holds only codes, not int4, group 32 + int4"),
    ],
)
def test_what_it_cannot_hold_is_refused_with_what_to_write(scheme, words):
    assert words in FORMAT.refuses(scheme)


def test_layers_with_and_without_zero_points_are_not_stored_together():
    one, other = coded(symmetric=True), coded(symmetric=False)
    assert FORMAT.clash({"a": one, "b": one}) is None
    assert "write the same symmetric: in all passes" in FORMAT.clash({"a": one, "b": other})


def test_another_layout_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match="^checkpoint_format = 'marlin' is not read; accepted: gptq, gptq_v2"):
        FORMAT.of_config({"checkpoint_format": "marlin"})
    with pytest.raises(ValueError, match="^format and checkpoint_format are gptq and gptq_v2, but must be equal"):
        FORMAT.of_config({"checkpoint_format": "gptq_v2", "format": "gptq"})
    with pytest.raises(ValueError, match="^pack_dtype = 'int16' is not read; accepted: int32"):
        FORMAT.of_config({"pack_dtype": "int16"})


def broken(name):
    """A stored layer with one mistake, its scheme, and the words of the error."""
    part = part_of(torch.zeros(32, 64, dtype=torch.int8), torch.ones(32, 2))
    tensors = encoded(FORMAT, part)
    if name == "shape":
        tensors["qweight"] = tensors["qweight"][:, :8]
    elif name == "index":
        tensors["g_idx"][3] = 2
    elif name == "negative":
        tensors["g_idx"][3] = -1
    elif name == "order":
        tensors["g_idx"] = tensors["g_idx"].flip(0)
    elif name == "zeros":
        tensors["qzeros"][0, 0] = 0x77777776
    elif name == "dtype":
        tensors["scales"] = tensors["scales"].int()
    return tensors, layer_of(part)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shape", r"qweight is torch.int32 \[8, 8\]"),
        ("index", "g_idx holds groups 0 to 2, but there are 2 groups"),
        ("negative", "g_idx holds groups -1 to 1"),
        ("order", "the config does not say desc_act"),
        ("zeros", "qzeros holds 6 to 7, but its config says sym, so all must be 8"),
        ("dtype", "scales holds torch.int32, not floats"),
    ],
)
def test_a_damaged_layer_is_named(name, words):
    tensors, scheme = broken(name)
    with pytest.raises(ValueError, match=words):
        decoded(FORMAT, tensors, scheme)


def test_a_missing_tensor_is_named_and_a_missing_index_in_order_is_not_needed():
    tensors, scheme = broken("")
    assert decoded(FORMAT, {k: v for k, v in tensors.items() if k != "g_idx"}, scheme).group_index is None
    with pytest.raises(KeyError, match="qzeros"):
        decoded(FORMAT, {k: v for k, v in tensors.items() if k != "qzeros"}, scheme)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.qweight": (10, 32), "a.scales": (2, 32)}, "a.qweight has 10 words for 64 inputs"),
        ({"a.qweight": (8, 32), "a.scales": (3, 32)}, "a has 3 groups of scales for 64 inputs"),
    ],
)
def test_shapes_that_no_option_explains_are_an_error(tensors, words):
    config = {"bits": 4, "group_size": 32, "checkpoint_format": "gptq", "sym": True}
    with pytest.raises(ValueError, match=words):
        FORMAT.schemes(config, {"a": (32, 64)}, tensors)


def test_a_layer_has_the_bits_and_the_group_size_that_the_config_states_for_it():
    changes = {"-:.*skipped": {}, "+:.*b$": {"sym": False, "bits": 8, "group_size": 128}}
    config = {"bits": 4, "group_size": 32, "sym": True, "dynamic": changes}
    shapes = {"a": (32, 64), "x.b": (32, 256)}
    stored = {"a.qweight": (8, 32), "a.scales": (2, 32), "x.b.qweight": (64, 32), "x.b.scales": (2, 32)}
    found = FORMAT.schemes(config, shapes, stored)
    assert found["a"].codes == CodesScheme(coded().codes.grid, 32)
    with pytest.raises(ValueError, match="a.qweight has 8 words for 64 inputs, but bits is 8"):
        FORMAT.schemes(config | {"bits": 8}, shapes, stored)
    with pytest.raises(ValueError, match="a has 2 groups of scales for 64 inputs, but group_size is 16"):
        FORMAT.schemes(config | {"group_size": 16}, shapes, stored)
    assert found["x.b"].codes == CodesScheme(coded("int8").codes.grid, 128, symmetric=False)
