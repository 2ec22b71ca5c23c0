"""pack-quantized: exact both ways, bit for bit what compressed-tensors packs, and read by it as the same weight."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schemes import coded, layer_of, rounding

from compress.checkpoint.formats.layouts.pack_quantized import (
    PackQuantized,
    input_arguments,
    sizes_that_work,
    stored_group_size,
)

LAYOUT = PackQuantized()
INTEGERS = [f"int{bits}" for bits in range(2, 9)]
quick = settings(max_examples=60)


def their_scheme(scheme):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    arguments = quantization.QuantizationArgs(**LAYOUT.weight_arguments(scheme))
    return quantization.QuantizationScheme(targets=["Linear"], weights=arguments, format="pack-quantized")


def their_compressor():
    return pytest.importorskip("compressed_tensors.compressors.pack_quantized.base").PackedQuantizationCompressor


@st.composite
def layers(draw):
    """Options of `make` that the layout can hold as they are."""
    group_size = draw(st.sampled_from(["channel", "tensor", 1, 8, 32]))
    width = draw(st.integers(1, 80))
    if isinstance(group_size, int):
        width = max(1, width // group_size) * group_size
    return {
        "grid": draw(st.sampled_from(INTEGERS)),
        "shape": (draw(st.integers(1, 70)), width),
        "group_size": group_size,
        "symmetric": group_size == "tensor" or draw(st.booleans()),
        "seed": draw(st.integers(0, 10**6)),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
    }


@quick
@given(layer=layers())
def test_what_is_stored_reads_back_as_it_was(make, same, layer):
    packed = make(**layer)
    tensors = {name: tensor.contiguous() for name, tensor in LAYOUT.encode(packed).items()}
    same(LAYOUT.decode(tensors, layer_of(packed)), packed)


@quick
@given(layer=layers())
def test_shapes_and_dtypes_are_those_of_the_specification(make, layer):
    packed = make(**layer)
    tensors, (rows, width), bits = LAYOUT.encode(packed), packed.shape, packed.grid.bits
    groups = {"channel": 1, "tensor": 1}.get(packed.group_size) or width // packed.group_size
    assert tensors["weight_packed"].dtype == torch.int32
    assert tensors["weight_packed"].shape == (rows, math.ceil(width * bits / 32))
    assert tensors["weight_scale"].dtype == layer["dtype"]
    assert tensors["weight_scale"].shape == ((1,) if packed.group_size == "tensor" else (rows, groups))
    assert tensors["weight_shape"].dtype == torch.int64
    assert tensors["weight_shape"].tolist() == [rows, width]
    assert ("weight_zero_point" in tensors) == (not layer["symmetric"])
    if not layer["symmetric"]:
        assert tensors["weight_zero_point"].dtype == torch.int32
        assert tensors["weight_zero_point"].shape == (math.ceil(rows * bits / 32), groups)


@quick
@given(layer=layers())
def test_compressed_tensors_reads_the_very_weight_we_compute_with(make, layer):
    packed = make(**layer)
    state = {name: tensor.contiguous() for name, tensor in LAYOUT.encode(packed).items()}
    found = their_compressor().decompress(state, their_scheme(layer_of(packed)))
    assert found["weight"].dtype == layer["dtype"]
    assert torch.equal(found["weight"], packed.dense(layer["dtype"]))
    if packed.zero is not None:
        assert torch.equal(found["weight_zero_point"], packed.zero)


@quick
@given(layer=layers())
def test_compressed_tensors_packs_the_same_bits(make, layer):
    packed = make(**{**layer, "dtype": torch.float32})
    state = {"weight": packed.dense(torch.float32), "weight_scale": LAYOUT.encode(packed)["weight_scale"]}
    if packed.zero is not None:
        state["weight_zero_point"] = packed.zero
    theirs, ours = their_compressor().compress(state, their_scheme(layer_of(packed))), LAYOUT.encode(packed)
    assert set(theirs) == set(ours)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_codes_and_zero_points_by_hand(make):
    packed = make("int4", (8, 8), "channel", symmetric=False)
    codes = replace(
        packed.codes(),
        codes=torch.arange(-8, 8, dtype=torch.int8).reshape(2, 8).repeat(4, 1),
        zero=torch.arange(-8.0, 0)[:, None],
    )
    tensors = LAYOUT.encode(type(packed).of(codes))
    assert [word & 0xFFFFFFFF for word in tensors["weight_packed"][:2, 0].tolist()] == [0x76543210, 0xFEDCBA98]
    assert [word & 0xFFFFFFFF for word in tensors["weight_zero_point"].flatten().tolist()] == [0x76543210]


@pytest.mark.parametrize(
    ("width", "group_size", "stored"),
    [(96, 64, 32), (80, 64, 16), (576, 128, 64), (48, 64, 16), (40, 3, 1), (40, 15, 5)],
)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_short_last_group_is_stored_in_smaller_groups_of_the_same_weight(
    make, same, width, group_size, stored, symmetric, dtype
):
    packed = make("int4", (5, width), group_size, symmetric, dtype=dtype)
    adapted = LAYOUT.adapt_part(packed)
    assert LAYOUT.adapt(packed.scheme, width) == adapted.scheme
    assert adapted.group_size == stored == math.gcd(width, group_size)
    assert adapted.scale.shape == (5, width // stored)
    assert torch.equal(adapted.words, packed.words)
    assert torch.equal(adapted.dense(dtype), packed.dense(dtype))
    tensors = LAYOUT.encode(adapted)
    same(LAYOUT.decode(tensors, layer_of(adapted)), adapted)
    found = their_compressor().decompress(tensors, their_scheme(layer_of(adapted)))
    assert torch.equal(found["weight"], packed.dense(dtype))


@pytest.mark.parametrize("group_size", [32, 64, "channel", "tensor"])
def test_whole_groups_are_stored_as_they_are(make, group_size):
    packed = make("int4", (4, 64), group_size)
    assert LAYOUT.adapt_part(packed) is packed and LAYOUT.adapt(packed.scheme, 64) == packed.scheme


@pytest.mark.parametrize(
    ("wanted", "width", "message"),
    [
        (coded(indexed=True), 64, "use act_order: static, or format: native"),
        (coded(group_size="tensor", symmetric=False), 64, "use group_size: channel, or symmetric: true"),
        (coded(group_size=64), 100, "group_size 64 does not divide the 100 inputs; use 20, 25, 50, 100, channel, or"),
        (
            coded(group_size=128),
            4104,
            "use 18, 19, 24, 27, 36, 38, 54, 57, 72, 76, 108, 114, 152, 171, 216, 228, channel",
        ),
        (
            coded(group_size=128),
            4099,
            "group_size 128 does not divide the 4099 inputs; use channel, or format: native",
        ),
        (coded(group_size=12), 64, "group_size 12 does not divide the 64 inputs; use 16, 32, 64, channel, or"),
    ],
)
def test_what_cannot_be_held_is_refused_with_what_can(wanted, width, message):
    assert message in LAYOUT.refuses(replace(wanted, shape=(8, width)))


@pytest.mark.parametrize(
    ("wanted", "width"),
    [
        (coded(), 64),
        (coded(group_size="channel", symmetric=False), 61),
        (coded(group_size="tensor"), 61),
        (coded(group_size=128, symmetric=False), 576),  # stored in groups of 64
        (coded(group_size=64), 80),  # of 16
        (coded(group_size=8), 64),
        (coded(group_size=1), 7),
    ],
)
def test_what_can_be_held_is_not_refused(wanted, width):
    assert LAYOUT.refuses(replace(wanted, shape=(8, width))) is None


@quick
@given(width=st.integers(1, 5000))
def test_the_sizes_that_a_refusal_names_are_not_refused(width):
    words = sizes_that_work(width).removeprefix("use ").removesuffix(", or format: native").split(", ")
    for word in words:
        assert LAYOUT.refuses(coded(group_size=int(word) if word.isdigit() else word, shape=(8, width))) is None


@quick
@given(width=st.integers(1, 2000), group_size=st.integers(1, 300))
def test_a_refusal_depends_on_the_size_it_would_be_stored_in(width, group_size):
    assume(width % group_size)
    stored = stored_group_size(width, group_size)
    assert width % stored == 0 == group_size % stored
    assert (LAYOUT.refuses(coded(group_size=group_size, shape=(8, width))) is None) == (stored >= min(16, group_size))


def test_the_arguments_of_the_config():
    assert LAYOUT.weight_arguments(coded("int3", 32, False)) == {
        "num_bits": 3,
        "type": "int",
        "symmetric": False,
        "group_size": 32,
        "strategy": "group",
        "dynamic": False,
    }
    assert LAYOUT.weight_arguments(coded(group_size="tensor"))["strategy"] == "tensor"
    assert LAYOUT.weight_arguments(coded(group_size="channel"))["group_size"] is None
    assert input_arguments(coded("int8", 32, True, rounding())) == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    assert input_arguments(coded("int8", 32, True, rounding("fp8_e4m3")))["type"] == "float"
    assert input_arguments(coded("int8", "channel", True, rounding(scale="static"))) == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }
