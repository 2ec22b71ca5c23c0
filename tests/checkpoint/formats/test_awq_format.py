"""AutoAWQ gemm: exact both ways, the order of its fields by hand, and what must not be read."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes import coded, decoded, encoded, layer_of, rounding

from compress.checkpoint.formats import FORMATS

FORMAT = FORMATS["awq"]


def stored_shapes(name, tensors):
    return {f"{name}.{key}": tuple(tensor.shape) for key, tensor in tensors.items()}


@settings(max_examples=60)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 4),
    group_size=st.sampled_from(["channel", "tensor", 16, 32, 64]),
    symmetric=st.booleans(),
    seed=st.integers(0, 999),
)
def test_what_is_stored_reads_back_as_it_was(make, same, rows, groups, group_size, symmetric, seed):
    shape = (8 * rows, groups * group_size if isinstance(group_size, int) else 24)
    part = make("int4", shape, group_size, symmetric, seed, torch.float16)
    assert FORMAT.refuses(layer_of(part)) is None
    stored = FORMAT.adapt_part(part)
    assert FORMAT.adapt(layer_of(part)) == layer_of(stored) and not stored.scheme.symmetric
    assert torch.equal(stored.dense(torch.float32), part.dense(torch.float32).expand(shape))
    tensors = encoded(FORMAT, stored)
    config = json.loads(json.dumps(FORMAT.config({"a": layer_of(stored)}, ["b"], "1")))
    read = FORMAT.of_config(config).schemes(config, {"a": shape, "b": shape}, stored_shapes("a", tensors))
    assert read == {"a": layer_of(stored)}
    same(decoded(FORMAT, tensors, read["a"]), stored)
    specs = FORMAT.tensors(read["a"])
    assert {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()} == {
        n: (s.shape, s.dtype) for n, s in specs.items()
    }


def test_the_order_of_columns_in_a_word_by_hand(make):
    part = FORMAT.adapt_part(make("int4", (8, 16), 16, dtype=torch.float16))
    codes = part.codes()
    codes.codes[:, :] = torch.arange(-8, 0, dtype=torch.int8)[:, None]  # the code of output o is o
    part = FORMAT.adapt_part(type(part).of(codes))
    part.zero[:, 0] = torch.arange(-8, 0, dtype=torch.int8)
    tensors = encoded(FORMAT, part)
    assert {word & 0xFFFFFFFF for word in tensors["qweight"].flatten().tolist()} == {0x75316420}
    assert [word & 0xFFFFFFFF for word in tensors["qzeros"].flatten().tolist()] == [0x75316420]  # not minus one


def test_weights_without_zero_points_get_zero_points_of_eight(make):
    tensors = encoded(FORMAT, FORMAT.adapt_part(make("int4", (8, 32), 32, dtype=torch.float16)))
    assert [word & 0xFFFFFFFF for word in tensors["qzeros"].flatten().tolist()] == [0x88888888]


def test_a_checkpoint_without_zero_points_is_read_as_symmetric(make, same):
    part = make("int4", (8, 64), 32, dtype=torch.float16)
    tensors = encoded(FORMAT, FORMAT.adapt_part(part))
    config = {"group_size": 32, "zero_point": False, "version": "gemm", "bits": 4}
    scheme = FORMAT.schemes(config, {"a": (8, 64)}, stored_shapes("a", tensors))["a"]
    same(decoded(FORMAT, tensors, scheme), part)
    tensors["qzeros"][0, 0] += 1
    with pytest.raises(ValueError, match="qzeros are not all 8"):
        decoded(FORMAT, tensors, scheme)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (coded("int3", 32), "format awq holds weights int4, not int3"),
        (coded("int4", 48, shape=(8, 96)), "no groups of 48 columns for 96 inputs; use 16, 32, channel"),
        (coded("int4", 32, shape=(12, 64)), "packs 8 rows into a word, not 12"),
        (coded("int4", 32, indexed=True, shape=(8, 64)), "act_order: static, format: gptq"),
        (coded("int4", 32, True, rounding(), shape=(8, 64)), "activations: none"),
    ],
)
def test_what_it_cannot_hold_is_refused_with_what_to_write(scheme, words):
    assert words in FORMAT.refuses(scheme)


def test_all_layers_share_one_group_size():
    assert FORMAT.clash({"a": coded(group_size=32), "b": coded(group_size=32)}) is None
    assert "one group size for all layers, not 32, 64" in FORMAT.clash({"a": coded(), "b": coded(group_size=64)})


@pytest.mark.parametrize("config", [{"version": "gemv"}, {"version": "GEMM", "bits": 3}])
def test_another_layout_is_an_error(config):
    with pytest.raises(ValueError, match="is not read; accepted: (gemm|4)"):
        FORMAT.of_config(config)


def test_a_damaged_layer_is_named(make):
    part = FORMAT.adapt_part(make("int4", (8, 64), 32, dtype=torch.float16))
    tensors = encoded(FORMAT, part)
    with pytest.raises(ValueError, match=r"qweight is torch.int32 \[32, 1\], but it must be torch.int32 \[64, 1\]"):
        decoded(FORMAT, {**tensors, "qweight": tensors["qweight"][:32]}, layer_of(part))
    with pytest.raises(KeyError, match="scales"):
        decoded(FORMAT, {k: v for k, v in tensors.items() if k != "scales"}, layer_of(part))


def test_dense_linears_of_blocks_are_listed_for_both_readers():
    """GPTQModel makes quantized layers of all linears in blocks that `dynamic` does not leave out."""
    scheme = coded("int4", 32, False)
    config = FORMAT.config({"m.0.q": scheme}, ["m.0.o", "lm_head"], "0.1")
    assert config["modules_to_not_convert"] == ["m.0.o", "lm_head"]
    assert config["dynamic"] == {r"-:^m\.0\.o$": {}}
    assert "dynamic" not in FORMAT.config({"m.0.q": scheme}, ["lm_head"], "0.1")
