"""Number grids: the conventions of integers by hand and against compressed-tensors; every grid rounds to its nearest value."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import E2M1_LEVELS, GRIDS, NF4_LEVELS, Float4Grid, Float8Grid, IntGrid, LevelGrid
from compress.numerics.quant.scales import FloatScale

INTEGERS = [grid for grid in GRIDS.values() if isinstance(grid, IntGrid) and grid.block == 1]
OTHERS = [grid for grid in GRIDS.values() if not isinstance(grid, IntGrid) and not grid.offset and grid.run == 1]
OFFSETS = [grid for grid in GRIDS.values() if grid.offset and grid.block == 1]
ALL = [grid for grid in GRIDS.values() if grid.run == 1]  # codes of runs: test_codebooks
PLAIN = [
    grid for grid in ALL if grid.scaling.stored is None and not grid.offset
]  # scales are floats; the others are test_scales' affair
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NUMBER = st.floats(-1e4, 1e4, width=32)
quick = settings(max_examples=25)


def by_name(grid):
    return grid.name if hasattr(grid, "name") else str(grid)


def every_code(grid):
    """All codes that stand for a finite number, as whole numbers in float32."""
    if isinstance(grid, IntGrid):
        return torch.arange(grid.lowest, grid.highest + 1).float()
    if grid.offset:
        return torch.arange(2**grid.bits).float()
    if isinstance(grid, LevelGrid):
        return torch.arange(len(grid.levels)).float()
    if isinstance(grid, Float4Grid):
        return torch.arange(16).float()
    codes = torch.arange(256, dtype=torch.uint8)
    return codes[codes.view(grid.dtype).float().isfinite()].float()


def fit(grid, values, symmetric=True, dtype=torch.float32):
    """Scale and zero of one group, as Python floats."""
    values = torch.tensor(values)
    scale, zero = grid.fit(values.min(), values.max(), symmetric, dtype)
    return float(scale), None if zero is None else float(zero)


def test_names_and_bits_agree():
    assert all(name == grid.name for name, grid in GRIDS.items())
    assert [GRIDS[f"int{bits}"].bits for bits in range(2, 9)] == list(range(2, 9))
    assert (GRIDS["fp8_e4m3"].bits, GRIDS["fp8_e5m2"].bits, GRIDS["fp4_e2m1"].bits, GRIDS["nf4"].bits) == (8, 8, 4, 4)
    assert len(NF4_LEVELS) == 16
    assert len(set(E2M1_LEVELS)) == 15  # -0 and 0 are one value
    assert all(GRIDS[name].bits == 4 for name in ("fp4_e2m1_pow2", "mxfp4", "nvfp4", "nf4_dq"))
    fixed = {
        "mxfp4": 32,
        "mxfp8": 32,
        "nvfp4": 16,
        "uint2_k": 16,
        "int3_k": 16,
        "uint4_k": 32,
        "uint5_k": 32,
        "int6_k": 16,
        "iq4_xs": 32,
        "iq3_s": 32,
        "iq3_xxs": 32,
        "iq2_s": 16,
        "iq2_xs": 16,
        "iq2_xxs": 32,
    }
    fixed |= dict.fromkeys(("uint2_tile", "uint3_tile", "uint4_tile"), 16)
    assert {grid.name: grid.group_size for grid in GRIDS.values() if grid.group_size} == fixed
    assert {grid.name: grid.block for grid in ALL if grid.block > 1} == {
        n: 16 if n.endswith("_tile") else 256 for n in fixed if n.endswith(("_k", "iq4_xs", "_tile"))
    }


@pytest.mark.parametrize("grid", INTEGERS, ids=by_name)
def test_integers_use_the_full_signed_range(grid):
    assert (grid.lowest, grid.highest) == (-(2 ** (grid.bits - 1)), 2 ** (grid.bits - 1) - 1)


@pytest.mark.parametrize(
    ("name", "values", "scale"),
    [
        ("int4", [-7.5, 2.0], 1.0),
        ("int4", [-1.0, 7.5], 1.0),
        ("int8", [-127.5, 3.0], 1.0),
        ("int2", [0.0, 3.0], 2.0),
        ("fp8_e4m3", [-448.0, 1.0], 1.0),
        ("fp8_e5m2", [57344.0, 1.0], 1.0),
        ("fp4_e2m1", [-3.0, 1.0], 0.5),
        ("nf4", [-0.25, 0.125], 0.25),
    ],
)
def test_symmetric_scale_by_hand(name, values, scale):
    assert fit(GRIDS[name], values) == (scale, None)


def test_asymmetric_scale_and_zero_by_hand():
    scale, zero = fit(GRIDS["int4"], [-1.0, 2.0], symmetric=False)
    assert scale == pytest.approx(0.2)
    assert zero == -3


@pytest.mark.parametrize(
    ("values", "zero"),
    [([1.0, 3.0], -8), ([-3.0, -1.0], 7)],  # the range is widened to hold zero, so zero sits at an end of the codes
)
def test_an_asymmetric_range_always_holds_zero(values, zero):
    grid = GRIDS["int4"]
    scale, actual = fit(grid, values, symmetric=False)
    assert (scale, actual) == (pytest.approx(3 / 15), zero)
    scale, actual = torch.tensor(scale), torch.tensor(actual)
    assert grid.decode(grid.encode(torch.tensor(0.0), scale, actual), scale, actual) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grid", PLAIN, ids=by_name)
def test_a_group_of_zeros_stays_zero_or_nearly_so(grid, dtype):
    for symmetric in (True, False) if isinstance(grid, IntGrid) else (True,):
        scale, zero = grid.fit(torch.zeros(2), torch.zeros(2), symmetric, dtype)
        values = grid.decode(grid.encode(torch.zeros(2), scale, zero), scale, zero)
        if grid.has_zero:
            assert scale.tolist() == [torch.finfo(dtype).eps] * 2 and values.tolist() == [0, 0]
        else:
            assert 0 < float(values.abs().max()) < 1e-7


@pytest.mark.parametrize("grid", PLAIN, ids=by_name)
def test_a_scale_beyond_the_storage_dtype_becomes_its_smallest_or_largest_number(grid):
    assert fit(grid, [-1e-9, 1e-9], dtype=torch.float16)[0] == 2.0**-24
    largest = 32768 if grid.name == "fp4_e2m1_pow2" else 65504
    scale, _ = fit(grid, [-1e38, 1e38], dtype=torch.float16)
    assert scale == largest
    values = torch.tensor([-1e38, 1e-9, 0.0, 1e38])
    assert grid.decode(grid.encode(values, torch.tensor(scale), None), torch.tensor(scale), None).isfinite().all()


@pytest.mark.parametrize("grid", PLAIN, ids=by_name)
@quick
@given(low=NUMBER, high=NUMBER, dtype=st.sampled_from(DTYPES), symmetric=st.booleans())
def test_the_scale_is_representable_in_the_storage_dtype_and_not_zero(grid, low, high, dtype, symmetric):
    low, high = torch.tensor(min(low, high)), torch.tensor(max(low, high))
    scale, zero = grid.fit(low, high, symmetric or not isinstance(grid, IntGrid), dtype)
    assert scale.dtype == torch.float32
    assert float(scale) == float(scale.to(dtype)) and (float(scale) > 0 or (grid.scaling.signed and scale != 0))
    if zero is not None:
        assert float(zero) == round(float(zero))
        assert grid.lowest <= float(zero) <= grid.highest


@pytest.mark.parametrize("grid", INTEGERS, ids=by_name)
@quick
@given(values=st.lists(NUMBER, min_size=1, max_size=8), symmetric=st.booleans())
def test_integer_scale_zero_and_codes_are_those_of_compressed_tensors(grid, values, symmetric):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    # their zero point where the scale is zero (underflow included) is the integer of a NaN
    assume(symmetric or float(torch.tensor(max(0, *values, 0) - min(0, *values, 0)) / (2**grid.bits - 1)) > 0)
    arguments = quantization.QuantizationArgs(
        num_bits=grid.bits, type="int", symmetric=symmetric, strategy="group", group_size=len(values)
    )
    weight = torch.tensor([values])
    low, high = weight.aminmax(dim=1, keepdim=True)
    theirs, their_zero = calculate_qparams(low, high, arguments)
    scale, zero = grid.fit(low, high, symmetric, torch.float32)
    assert torch.equal(scale, theirs)
    assert (zero is None) if symmetric else torch.equal(zero, their_zero.float())
    codes = grid.encode(weight, scale, zero)
    assert torch.equal(codes, quantize(weight, theirs, their_zero, arguments))
    assert torch.equal(grid.decode(codes, scale, zero), fake_quantize(weight, theirs, their_zero, arguments))


@quick
@given(values=st.lists(NUMBER, min_size=1, max_size=8), dtype=st.sampled_from(DTYPES))
def test_fp8_scale_and_values_are_those_of_compressed_tensors(values, dtype):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    # their eps for a scale of zero, underflow included, is that of fp8, 0.125
    assume(float(torch.tensor(max(map(abs, values)) / 448).to(dtype)) > 0)
    arguments = quantization.QuantizationArgs(
        num_bits=8, type="float", symmetric=True, strategy="channel", scale_dtype=dtype
    )
    weight = torch.tensor([values])
    low, high = weight.aminmax(dim=1, keepdim=True)
    theirs, zero = calculate_qparams(low, high, arguments)
    grid = GRIDS["fp8_e4m3"]
    scale, _ = grid.fit(low, high, True, dtype)
    assert torch.equal(scale, theirs)
    ours = grid.decode(grid.encode(weight, scale, None), scale, None)
    assert torch.equal(ours, fake_quantize(weight, theirs, zero, arguments))


def test_integers_round_half_to_even_and_saturate():
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.5, 100.0, -8.5, -100.0])
    codes = GRIDS["int4"].encode(values, torch.tensor(1.0), None)
    assert codes.tolist() == [0, 2, 2, 0, -2, -2, 7, 7, -8, -8]


def test_the_zero_point_is_added_before_rounding():
    codes = GRIDS["int4"].encode(torch.tensor([0.5, 1.5]), torch.tensor(1.0), torch.tensor(1.0))
    assert codes.tolist() == [2, 2]  # round(1.5), round(2.5): to even of the sum, not of the value


def test_fp8_saturates_instead_of_overflowing():
    for name, top in (("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)):
        grid, single = GRIDS[name], torch.tensor(1.0)
        assert grid.decode(grid.encode(torch.tensor([1e9, -1e9]), single, None), single, None).tolist() == [top, -top]


@pytest.mark.parametrize("grid", ALL, ids=by_name)
@quick
@given(values=st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=16), power=st.integers(-6, 2))
def test_encode_finds_the_nearest_value(grid, values, power):
    scale = torch.tensor(2.0**power)  # a power of two, so that dividing by it is exact
    values = torch.tensor(values)
    levels = (grid.decode(every_code(grid), scale, None)).double()
    actual = grid.decode(grid.encode(values, scale, None), scale, None).double()
    nearest = (values.double()[:, None] - levels).abs().amin(1)
    slack = 1e-6 * levels.abs().max()  # NF4's midpoints are rounded to float32
    assert ((values.double() - actual).abs() <= nearest + (slack if grid.name == "nf4" else 0)).all()


@pytest.mark.parametrize("grid", ALL, ids=by_name)
@quick
@given(scale=st.floats(2**-10, 2**10, width=32), share=st.floats(0, 1))
def test_encoding_what_codes_decode_to_gives_the_codes(grid, scale, share):
    codes, scale = every_code(grid), torch.tensor(scale)
    zeros = [None]
    if isinstance(grid, IntGrid):
        zeros.append(torch.tensor(float(math.floor(grid.lowest + share * (grid.highest - grid.lowest)))))
    for zero in zeros:
        assert torch.equal(grid.encode(grid.decode(codes, scale, zero), scale, zero), codes)


@pytest.mark.parametrize("grid", OFFSETS, ids=by_name)
@quick
@given(low=st.floats(-100, 100, width=32), range_=st.floats(2**-6, 100, width=32))
def test_grids_with_a_minimum_reach_both_ends_of_any_range(grid, low, range_):
    values = torch.tensor([low, low + range_ / 2, low + range_])
    scale, minimum = grid.fit(values.min(), values.max(), False, torch.float32)
    actual = grid.decode(grid.encode(values, scale, minimum), scale, minimum)
    assert float(minimum) == float(values[0])
    assert ((actual - values).abs() <= scale / 2 * 1.001 + 1e-5 * values.abs().max()).all()


@pytest.mark.parametrize("grid", ALL, ids=by_name)
def test_the_ends_of_the_fitted_range_are_met_within_half_a_step(grid):
    values = torch.tensor([[-1.0, 0.3, 1.0]])
    actual = quantize(values, grid, "channel", not grid.offset)
    half = actual.scale * 0.5 if isinstance(grid, IntGrid) or grid.offset or grid.scaling != FloatScale() else 1e-6
    if grid.name.startswith("iq4"):  # one end is a level, and the other one lies between -127 and -104
        half = actual.scale.abs() * (127 - 104) / 2
    slack = 1e-5 if grid.block == 1 else 2**-11  # the step of a super-block is rounded to float16
    assert ((actual.dense() - values).abs()[:, [0, 2]] <= half + slack).all()


@pytest.mark.parametrize("grid", OTHERS, ids=by_name)
def test_tables_and_floats_have_no_zero_point(grid):
    assert grid.symmetric_only
    assert grid.fit(torch.tensor([[-1.0]]), torch.tensor([[2.0]]), False, torch.float32)[1] is None
    zero = grid.encode(torch.tensor([0.0]), torch.tensor(1.0), None)
    assert (grid.decode(zero, torch.tensor(1.0), None).tolist() == [0.0]) == grid.has_zero
    assert grid.has_zero == (grid.name not in ("binary", "iq4_nl", "iq4_xs"))


def test_levels_that_reach_further_on_one_side_turn_to_the_longer_end():
    """-127 to 113: a scale of either sign reaches both ends; the smaller one is taken."""
    grid = GRIDS["iq4_nl"]
    assert fit(grid, [-254.0, 3.0]) == (2.0, None) and fit(grid, [-3.0, 254.0]) == (-2.0, None)
    assert fit(grid, [-226.0, 226.0]) == (pytest.approx(2.0), None)
    actual = quantize(torch.tensor([[-3.0, 208.0, 254.0, -226.0]]), grid, "channel")
    assert actual.dense().flatten().tolist() == pytest.approx([-2.0, 208.0, 254.0, -226.0])


def test_ternary_and_binary_by_hand():
    """Scale 0.5: ternary rounds w / 0.5 and clips it to -1, 0, 1; binary is the sign, that of zero being -1."""
    values, scale = torch.tensor([1.7, 0.3, 0.2, 0.0, -0.1, -0.26, -9.0]), torch.tensor(0.5)
    for name, expected in (("ternary", [1, 1, 0, 0, 0, -1, -1]), ("binary", [1, 1, 1, -1, -1, -1, -1])):
        grid = GRIDS[name]
        codes = grid.encode(values, scale, None)
        assert grid.decode(codes, scale, None).tolist() == [0.5 * level for level in expected]
        assert grid.averaged and codes.max() < 2**grid.bits


def test_integers_can_have_a_zero_point():
    assert not any(grid.symmetric_only for grid in INTEGERS)


def test_e2m1_ties_go_to_the_even_neighbour_and_zero_keeps_its_sign():
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 100.0]
    single = torch.tensor(1.0)
    grid = GRIDS["fp4_e2m1"]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]
    codes = grid.encode(torch.tensor(values), single, None)
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7]
    assert grid.decode(codes, single, None).tolist() == expected
    assert grid.encode(-torch.tensor(values), single, None).tolist() == (codes + 8).tolist()
    assert grid.encode(torch.tensor([-0.0, -0.1, 0.1, 0.0]), single, None).tolist() == [8, 8, 0, 0]


@quick
@given(values=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=16))
def test_e2m1_codes_are_those_of_compressed_tensors(values):
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4

    weight = torch.tensor([values[: len(values) // 2 * 2]]) + 0.0  # they lose the sign of an exact -0
    theirs = helpers.pack_fp4_to_uint8(cast_to_fp4(weight.clone()))
    codes = GRIDS["fp4_e2m1"].encode(weight, torch.tensor(1.0), None).to(torch.uint8)
    assert torch.equal(codes[:, 0::2] | codes[:, 1::2] << 4, theirs)


def test_fp8_codes_are_bit_patterns():
    grid = Float8Grid("fp8_e4m3", 8)
    codes = grid.encode(torch.tensor([1.0, -1.0, 0.0, 448.0]), torch.tensor(1.0), None)
    assert codes.tolist() == [0x38, 0xB8, 0x00, 0x7E]  # exponent bias 7, three bits of mantissa


def test_nf4_codes_are_indexes_into_the_ordered_table():
    grid = GRIDS["nf4"]
    levels = torch.tensor(NF4_LEVELS)
    assert grid.encode(levels, torch.tensor(1.0), None).tolist() == list(range(16))
    assert list(NF4_LEVELS) == sorted(NF4_LEVELS)
    assert NF4_LEVELS[7] == 0


@pytest.mark.parametrize("grid", OTHERS, ids=by_name)
def test_a_transposed_tensor_has_the_same_codes_and_no_warning(grid, recwarn):
    values, scale = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).T, torch.tensor(0.5)
    torch.set_warn_always(True)  # otherwise one warning per program
    try:
        actual = grid.encode(values, scale, None)
    finally:
        torch.set_warn_always(False)
    assert torch.equal(actual, grid.encode(values.contiguous(), scale, None))
    assert [str(warning.message) for warning in recwarn] == []
