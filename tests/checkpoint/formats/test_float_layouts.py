"""float-, mxfp4-pack- and nvfp4-pack-quantized: exact both ways, and read by compressed-tensors as the same weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes import layer_of

from compress.checkpoint.formats.layouts.float_quantized import FloatQuantized
from compress.checkpoint.formats.layouts.fp4_pack import as_bytes, as_words
from compress.checkpoint.formats.layouts.mxfp4_pack_quantized import MXFP4PackQuantized
from compress.checkpoint.formats.layouts.nvfp4_pack_quantized import NVFP4PackQuantized

FLOAT8 = FloatQuantized()
FP4 = {"mxfp4": (MXFP4PackQuantized(), 32), "nvfp4": (NVFP4PackQuantized(), 16)}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
quick = settings(max_examples=40)


def their_scheme(layout, packed):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    arguments = quantization.QuantizationArgs(**layout.weight_arguments(layer_of(packed)))
    return quantization.QuantizationScheme(targets=["Linear"], weights=arguments, format=layout.name)


def read_by_them(layout, packed):
    base = pytest.importorskip("compressed_tensors.compressors.base")
    compressor = base.BaseCompressor.get_value_from_registry(layout.name)
    return compressor.decompress(layout.encode(packed), their_scheme(layout, packed))["weight"]


@quick
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    group_size=st.sampled_from(["channel", "tensor"]),
    seed=st.integers(0, 10**6),
    dtype=DTYPES,
)
def test_8_bit_floats(make, same, shape, group_size, seed, dtype):
    packed = make("fp8_e4m3", shape, group_size, seed=seed, dtype=dtype)
    tensors = FLOAT8.encode(packed)
    rows = (1,) if group_size == "tensor" else (shape[0], 1)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == {
        "weight": (torch.float8_e4m3fn, shape),
        "weight_scale": (dtype, rows),
    }
    same(FLOAT8.decode(tensors, layer_of(packed)), packed)
    assert torch.equal(read_by_them(FLOAT8, packed), packed.dense(dtype))


@pytest.mark.parametrize("name", FP4)
@quick
@given(rows=st.integers(1, 20), groups=st.integers(1, 5), seed=st.integers(0, 10**6), dtype=DTYPES)
def test_4_bit_floats(make, same, name, rows, groups, seed, dtype):
    layout, size = FP4[name]
    packed = make(name, (rows, size * groups), size, seed=seed, dtype=dtype)
    tensors = layout.encode(packed)
    wanted = {
        "weight_packed": (torch.uint8, (rows, size * groups // 2)),
        "weight_scale": (torch.uint8 if name == "mxfp4" else torch.float8_e4m3fn, (rows, groups)),
    }
    if name == "nvfp4":
        wanted["weight_global_scale"] = (torch.float32, (1,))
    assert {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()} == wanted
    same(layout.decode(tensors, layer_of(packed)), packed)
    assert torch.equal(read_by_them(layout, packed), packed.dense(torch.bfloat16))


def test_mxfp4_loses_nothing_in_bfloat16(make):
    packed = make("mxfp4", (8, 64), 32)
    assert torch.equal(packed.dense(torch.bfloat16).float(), packed.dense(torch.float32))


def test_two_codes_in_a_byte_by_hand():
    # 0.5, -6, 1.5, -0: the even column in the low half
    words = torch.tensor([[0x83F1]], dtype=torch.int32)
    assert as_bytes(words)[0, :2].tolist() == [0xF1, 0x83]
    assert torch.equal(as_words(words.view(torch.uint8)), words)
