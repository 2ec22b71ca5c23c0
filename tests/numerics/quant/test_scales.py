"""Scales as they are stored: by hand, against compressed-tensors, and exact to the file and back."""

import math

import pytest
import torch
from draws import random
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compress.layers.parts.codes import CodesPart
from compress.numerics.quant.codes import fit_shared, quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.scales import E8M0, DoubleScale, Float8Scale, FloatScale, PowerOfTwo

F32 = torch.float32
SPAN = 6.0
KINDS = [FloatScale(), PowerOfTwo(), E8M0(), Float8Scale(), DoubleScale(block=4)]
EXTENTS = st.lists(st.floats(0, 1e4, width=32), min_size=1, max_size=12)
quick = settings(max_examples=60)


def by_name(kind):
    return type(kind).__name__


def scales(kind, extents, span=SPAN, dtype=F32):
    return kind.round(torch.tensor(extents), span, dtype, None)


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
@quick
@given(extents=EXTENTS, dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_a_rounded_scale_is_positive_and_exact_to_the_file_and_back(kind, extents, dtype):
    extent = torch.tensor([extents])
    shared = kind.fit_shared(extent, SPAN, None)
    assert (0 if shared is None else shared.numel()) == kind.shared_count(*extent.shape)
    scale = kind.round(extent, SPAN, dtype, shared)
    assert (scale > 0).all() and scale.isfinite().all()
    stored = kind.encode(scale, shared)
    if kind.stored is None:
        assert torch.equal(scale.to(dtype).to(F32), scale)
    else:
        assert stored.dtype == kind.stored
    assert torch.equal(kind.decode(stored, shared), scale)


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
@quick
@given(extents=EXTENTS)
def test_one_group_of_a_matrix_is_rounded_as_in_the_whole(kind, extents):
    extent = torch.tensor(extents * 3).view(3, -1)
    shared = kind.fit_shared(extent, SPAN, None)
    full = kind.round(extent, SPAN, F32, shared)
    for group in range(extent.shape[1]):
        part = kind.part(shared, 3, extent.shape[1], group)
        assert torch.equal(kind.round(extent[:, group : group + 1], SPAN, F32, part)[:, 0], full[:, group])


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (3.4, 0.5),
        (3.5, 1.0),
        (6.0, 1.0),
        (6.9, 1.0),
        (7.0, 2.0),
        (3.4999998, 0.5),
        (2.0**-126, 2.0**-127),
        (0, 2.0**-127),
    ],
)
def test_the_exponent_of_mxfp4_by_hand(amax, scale):
    actual = scales(E8M0(), [float(amax)])
    assert actual.tolist() == [scale]
    assert E8M0().encode(actual, None).tolist() == [127 + math.log2(scale)]


@quick
@given(low=EXTENTS, high=EXTENTS)
def test_the_scales_of_mxfp4_are_those_of_compressed_tensors(low, high):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization.utils import calculate_qparams

    count = min(len(low), len(high))
    low, high = -torch.tensor(low[:count]), torch.tensor(high[:count])
    assume(bool((torch.maximum(-low, high) >= 2.0**-120).all()))  # below, theirs is an integer of -infinity
    arguments = quantization.QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    theirs, _ = calculate_qparams(low, high, arguments)
    ours, _ = GRIDS["mxfp4"].fit(low, high, True, F32)
    assert torch.equal(ours, theirs)
    assert torch.equal(E8M0().encode(ours, None), compress_mx_scale(theirs, torch.uint8))


def test_the_global_scale_of_nvfp4_by_hand():
    kind = Float8Scale()
    assert kind.fit_shared(torch.tensor([[1.0, 3.0]]), SPAN, None).tolist() == [896]
    assert kind.fit_shared(torch.tensor([[1.0, 3.0]]), SPAN, 6.0).tolist() == [448]  # another layer is larger
    assert kind.fit_shared(torch.tensor([[0.0]]), SPAN, None).tolist() == [1]
    shared = torch.tensor([896.0])
    actual = kind.round(torch.tensor([[3.0, 1.0, 0.0, 1e-7]]), SPAN, F32, shared)
    # 3 -> 448; 1/6 * 896 = 149.33 -> 144, the nearest of 8 steps in 128..256; nothing -> eps; too little -> 2^-9
    assert (actual * shared).tolist() == [[448.0, 144.0, 0.125, 2.0**-9]]


def test_scales_of_nvfp4_saturate_where_a_group_grows_beyond_the_global_scale():
    actual = Float8Scale().round(torch.tensor([[30.0]]), SPAN, F32, torch.tensor([896.0]))
    assert actual.item() == 0.5  # 448 / 896


@quick
@given(seed=st.integers(0, 10**6), power=st.integers(-12, 8))
def test_nvfp4_is_that_of_compressed_tensors(seed, power):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = random(4, 48, seed=seed) ** 3 * 2.0**power
    arguments = quantization.QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        symmetric=True,
        scale_dtype=torch.float8_e4m3fn,
    )
    shared = generate_gparam(*weight.aminmax())
    low, high = weight.view(4, 3, 16).aminmax(dim=-1)
    scale, _ = calculate_qparams(low, high, arguments, shared)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": shared}
    theirs = NVFP4PackedCompressor.compress(state, scheme)
    packed = CodesPart.of(quantize(weight, GRIDS["nvfp4"], 16))
    assert torch.equal(packed.shared, shared)
    assert torch.equal(packed.scale, theirs["weight_scale"].view(torch.uint8))
    assert torch.equal(packed.words.view(torch.uint8), theirs["weight_packed"])


@pytest.mark.parametrize(
    ("wanted", "found"), [(1.0, 1.0), (1.0001, 2.0), (3.0, 4.0), (4.0, 4.0), (0.3, 0.5), (2.0**-30, 2.0**-24)]
)
def test_a_power_of_two_covers_the_group(wanted, found):
    assert scales(PowerOfTwo(), [wanted], span=1.0, dtype=torch.float16).tolist() == [found]


def test_double_quantization_by_hand():
    kind = DoubleScale(block=2)
    extent = torch.tensor([[6.0, 12.0], [18.0, 24.0]])  # scales 1, 2 | 3, 4 with mean 2.5
    shared = kind.fit_shared(extent, SPAN, None)
    assert shared.tolist() == pytest.approx([2.5, 1.5 / 127, 1.5 / 127])
    scale = kind.round(extent, SPAN, F32, shared)
    # 1 is -127 steps off; 2 is -42.33 steps off, -42 of them
    assert scale.flatten().tolist() == pytest.approx([1.0, 2.5 - 42 * 1.5 / 127, 2.5 + 42 * 1.5 / 127, 4.0])
    assert kind.encode(scale, shared).tolist() == [[1, 86], [170, 255]]


def test_double_quantization_errs_by_half_a_step_of_its_block_at_most():
    extent = 6 + random(40, 30).abs() * 6
    kind = DoubleScale()
    shared = kind.fit_shared(extent, SPAN, None)
    assert shared.numel() == 1 + 5  # 1200 scales
    error = (kind.round(extent, SPAN, F32, shared) - extent / 6).abs().flatten()
    for block in range(5):
        assert error[256 * block : 256 * (block + 1)].max() <= shared[1 + block] * 0.5001


def test_what_has_no_shared_numbers_is_told_so():
    weight = random(3, 64)
    blocks = {
        "uint2_k": 6,
        "int3_k": 3,
        "uint4_k": 6,
        "uint5_k": 6,
        "int6_k": 3,
        "iq4_xs": 3,
        **dict.fromkeys(("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs"), 3),
    }  # steps of scales and of minima
    for name, grid in GRIDS.items():
        tiles = dict.fromkeys(("uint2_tile", "uint3_tile", "uint4_tile"), 4 * 4)  # four numbers of four tiles
        count = {"nvfp4": 1, "nf4_dq": 2, "nf4_bnb_dq": 2, "fp4_bnb_dq": 2, **blocks, **tiles}.get(name)
        actual = fit_shared(weight, grid, 16)
        assert (actual is None) if count is None else actual.numel() == count
