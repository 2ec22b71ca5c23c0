"""int-quantized: signed bytes, exact both ways, and read by compressed-tensors as the same weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes import coded, layer_of, rounding

from compress.checkpoint.formats.layouts.int_quantized import IntQuantized
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.grids import GRIDS

INT8 = GRIDS["int8"]
LAYOUT = IntQuantized()
LAYERS = st.fixed_dictionaries(
    {
        "grid": st.just("int8"),
        "shape": st.tuples(st.integers(1, 40), st.integers(1, 70)),
        "group_size": st.sampled_from(["channel", "tensor"]),
        "symmetric": st.booleans(),
        "seed": st.integers(0, 10**6),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    }
)
quick = settings(max_examples=50)


@quick
@given(layer=LAYERS)
def test_what_is_stored_reads_back_as_it_was(make, same, layer):
    packed = make(**layer)
    same(LAYOUT.decode(LAYOUT.encode(packed), layer_of(packed, INT8)), packed)


@quick
@given(layer=LAYERS)
def test_shapes_and_dtypes_are_those_of_the_specification(make, layer):
    packed = make(**layer)
    tensors = LAYOUT.encode(packed)
    assert tensors["weight"].dtype == torch.int8
    assert torch.equal(tensors["weight"], packed.codes().codes)
    shape = (1,) if packed.group_size == "tensor" else (packed.shape[0], 1)
    assert tensors["weight_scale"].shape == shape
    assert tensors["weight_scale"].dtype == layer["dtype"]
    assert set(tensors) == {"weight", "weight_scale"} | (set() if layer["symmetric"] else {"weight_zero_point"})
    if not layer["symmetric"]:
        assert tensors["weight_zero_point"].dtype == torch.int8
        assert tensors["weight_zero_point"].shape == shape


@quick
@given(layer=LAYERS)
def test_compressed_tensors_reads_the_very_weight_we_compute_with(make, layer):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressor = pytest.importorskip("compressed_tensors.compressors.naive_quantized.base").IntQuantizationCompressor
    packed = make(**layer)
    arguments = quantization.QuantizationArgs(**LAYOUT.weight_arguments(layer_of(packed, INT8)))
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments, format="int-quantized")
    found = compressor.decompress(LAYOUT.encode(packed), scheme)
    assert torch.equal(found["weight"], packed.dense(layer["dtype"]))


@pytest.mark.parametrize(
    ("scheme", "wanted"),
    [
        (coded("int8", "channel", True, rounding()), True),
        (coded("int8", "tensor", True, rounding()), True),
        (coded("int8", "channel", False, rounding()), True),
        (coded("int8", "channel"), False),
        (coded("int8", 64, True, rounding()), False),
        (coded("int4", "channel", True, rounding()), False),
        (coded("int8", "channel", True, rounding("fp8_e4m3")), False),
        (coded("int8", "channel", True, rounding(), indexed=True), False),
        (LayerScheme((6, 64), transforms=(rounding(),)), False),
    ],
)
def test_it_suits_whole_rows_of_bytes_with_inputs_in_bytes(scheme, wanted):
    assert LAYOUT.suits(scheme) is wanted
