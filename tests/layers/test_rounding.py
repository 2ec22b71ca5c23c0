"""Rounding of inputs: the scale of each token or a stored one, and columns that are spared, against integer products."""

import pytest
import torch
from draws import random

from compress.kernels import dispatch
from compress.layers.linear import CompressedLinear
from compress.layers.parts.codes import CodesPart
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.inputs import outlier_columns

INT8 = GRIDS["int8"]


def integer_product(x, weight, scale):
    """x W^T by products of integers; scale: of x, per token or one for all. Returns float64."""
    codes = quantize(weight, INT8)
    whole = (x / scale).round().clamp(-128, 127).to(torch.int64) @ codes.codes.to(torch.int64).T
    return whole.double() * scale.double() * codes.scale.double().T


def test_a_token_by_hand():
    x = torch.tensor([[127.5, -3.4, 0.5], [0.0, 0.0, 0.0]])
    assert InputRounding.of(INT8)(x).tolist() == [[127.0, -3.0, 0.0], [0.0, 0.0, 0.0]]  # 127.5 needs a code of 128


def test_a_stored_scale_serves_all_tokens_and_saturates():
    x = torch.tensor([[10.0, -3.4], [0.6, 200.0]])
    assert InputRounding.of(INT8, scale=torch.tensor([1.0]))(x).tolist() == [[10.0, -3.0], [1.0, 127.0]]


def test_a_token_with_a_zero_point_by_hand():
    """[-1, 14] in 16 steps of 1: codes -8 to 7 with the zero point -7; one of positive numbers begins at zero."""
    x = torch.tensor([[-1.0, 3.4, 14.0], [15.0, 7.6, 8.0]])
    found = InputRounding.of(GRIDS["int4"], symmetric=False)(x)
    assert found.tolist() == [[-1.0, 3.0, 14.0], [15.0, 8.0, 8.0]]


@pytest.mark.parametrize("static", [False, True])
def test_rounded_inputs_times_codes_are_the_product_in_integers(static):
    x, weight = random(5, 32), random(7, 32, seed=1)
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    scale = scale.max().reshape(1) if static else scale
    found = InputRounding.of(INT8, scale if static else None)(x) @ quantize(weight, INT8).dense().T
    torch.testing.assert_close(found.double(), integer_product(x, weight, scale), rtol=1e-5, atol=1e-5)


def test_outliers_are_split_off_as_the_paper_does():
    x, weight = random(2, 3, 32), random(7, 32, seed=1)
    x[0, 1, 4], x[1, 2, 9] = 60.0, -6.0  # one of them exactly at the threshold
    codes = quantize(weight, INT8)
    inside = x.clone()
    inside[..., [4, 9]] = 0
    rows = inside.reshape(-1, 32)
    wanted = integer_product(rows, weight, rows.abs().amax(-1, keepdim=True) / 127.5)
    wanted += x.reshape(-1, 32)[:, [4, 9]].double() @ codes.dense()[:, [4, 9]].double().T
    rounding = InputRounding.of(INT8, threshold=6.0)
    found = rounding(x).reshape(-1, 32) @ codes.dense().T
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert outlier_columns(x, 6.0, None).nonzero().flatten().tolist() == [4, 9]
    fixed = InputRounding.of(INT8, columns=outlier_columns(x, 6.0, None))
    assert torch.equal(fixed(x), rounding(x))


def test_fixed_columns_do_not_depend_on_the_other_tokens_of_the_call_and_runtime_ones_do():
    x = random(2, 8)
    x[1, 3] = 60.0
    columns = torch.arange(8) == 3
    assert torch.equal(InputRounding.of(INT8, columns=columns)(x)[0], InputRounding.of(INT8, columns=columns)(x[0]))
    assert not torch.equal(InputRounding.of(INT8, threshold=6.0)(x)[0], InputRounding.of(INT8, threshold=6.0)(x[0]))


def test_without_outliers_it_is_plain_rounding():
    x = random(4, 16).clamp(-5, 5)
    assert torch.equal(InputRounding.of(INT8, threshold=6.0)(x), InputRounding.of(INT8)(x))


@pytest.mark.parametrize("rounding", [InputRounding.of(INT8), InputRounding.of(INT8, threshold=6.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_tokens_at_all_and_the_dtype_of_the_inputs(rounding, dtype):
    assert rounding(torch.empty(0, 8, dtype=dtype)).shape == (0, 8)
    assert rounding(random(3, 8).to(dtype)).dtype == dtype


# Four bits


def test_four_bits_by_hand_with_a_clipped_scale():
    """15 / 7.5 = 2: codes 7 (7.5 is beyond), -3 and 1; clipped to half of it the scale is 1, and 15 saturates at 7."""
    x = torch.tensor([[15.0, -6.4, 2.2]])
    assert InputRounding.of(GRIDS["int4"])(x).tolist() == [[14.0, -6.0, 2.0]]
    assert InputRounding.of(GRIDS["int4"], clip=0.5)(x).tolist() == [[7.0, -6.0, 2.0]]


def test_groups_of_mxfp4_have_powers_of_two():
    """The largest magnitude 12 has the exponent 3, E2M1's 6 the exponent 2: the scale is 2; the second group has 1/2."""
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([12.0, -7.0, 1.2, 0.4])
    x[0, 32:34] = torch.tensor([3.0, -0.6])
    found = InputRounding.of(GRIDS["mxfp4"], group=32)(x)
    assert found[0, :4].tolist() == [12.0, -8.0, 1.0, 0.0] and found[0, 32:34].tolist() == [3.0, -0.5]


def test_scales_of_nvfp4_share_the_number_of_their_token():
    """448 * 6 / absmax makes the scale of the largest group 448; so a token is rounded alike beside any other one."""
    x = random(4, 3, 64)
    x[0, 1, 5], x[2, 2] = 900.0, 0.0
    rounding = InputRounding.of(GRIDS["nvfp4"], group=16)
    found = rounding(x)
    for i, j in ((0, 0), (0, 1), (2, 2), (3, 1)):
        assert torch.equal(found[i, j], rounding(x[i, j][None])[0])
    group = x[0, 1, :16]
    shared = 448 * 6 / group.abs().max()
    scale = (group.abs().max() / 6 * shared).to(torch.float8_e4m3fn).float() / shared
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = levels[((group.abs() / scale)[:, None] - levels).abs().argmin(1)] * group.sign() * scale
    assert torch.allclose(found[0, 1, :16], nearest, rtol=1e-6)
    assert float((found - x).norm() / x.norm()) < 0.1


@pytest.mark.parametrize("clip", [0.0, -1.0, 1.5])
def test_a_clip_that_no_scheme_can_have(clip):
    scheme = RoundingScheme(GRIDS["int4"], clip=clip)
    with pytest.raises(ValueError, match="clip of rounding is .* above 0 and at most 1"):
        RoundingScheme.from_json(scheme.to_json())


def test_the_scheme_says_what_is_clipped():
    scheme = RoundingScheme(GRIDS["int4"], clip=0.9)
    assert RoundingScheme.from_json(scheme.to_json()) == scheme and scheme.text == "inputs int4, clipped to 0.9"
    assert "clip" not in RoundingScheme(GRIDS["int8"]).to_json()


def test_no_kernel_for_whole_scales_computes_clipped_ones():
    part, x = CodesPart.of(quantize(random(8, 64), INT8)), random(2, 64)
    clipped = InputRounding.of(INT8, clip=0.5)
    layer = CompressedLinear(part, None)
    layer.round_inputs(clipped)
    assert torch.allclose(layer(x), clipped(x) @ part.dense(torch.float32).T, atol=1e-5)


# Groups of channels


def in_groups(**options):
    """Groups {0, 2} of range [-1, 14] and {1, 3} of range [-30, 0] in int4: steps of 1 and 2, zero points -7 and 7."""
    index, ranges = torch.tensor([0, 1, 0, 1]), (torch.tensor([-1.0, -30.0]), torch.tensor([14.0, 0.0]))
    return InputRounding.of_groups(GRIDS["int4"], index, 2, False, ranges, torch.float32, **options)


def test_static_groups_of_channels_by_hand():
    rounding = in_groups()
    assert rounding.scale.tolist() == [1.0, 2.0] and rounding.zero.tolist() == [-7, 7]
    x = torch.tensor([[3.4, -3.4, -5.0, -100.0], [20.0, 5.0, 0.6, -0.9]])
    assert rounding(x).tolist() == [[3.0, -4.0, -1.0, -30.0], [14.0, 0.0, 1.0, 0.0]]


def test_groups_of_each_token_by_hand():
    """Symmetric: absmax 15 and 7.5 are 7.5 steps of 2 and of 1. The second token has steps of 4 and of 2."""
    rounding = InputRounding.of_groups(GRIDS["int4"], torch.tensor([0, 1, 0, 1]), 2, True, None, torch.float32)
    x = torch.tensor([[-15.0, 7.5, 3.2, -2.6], [30.0, -15.0, 6.2, 0.8]])
    assert rounding(x).tolist() == [[-16.0, 7.0, 4.0, -3.0], [28.0, -16.0, 8.0, 0.0]]
    assert torch.equal(rounding(x[1]), rounding(x)[1]) and rounding(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("symmetric", [False, True])
def test_groups_of_a_token_are_its_contiguous_groups_where_these_are_contiguous(symmetric):
    x, index = random(3, 5, 32), torch.arange(32) // 8
    found = InputRounding.of_groups(INT8, index, 4, symmetric, None, torch.float32)(x)
    wanted = InputRounding.of(INT8, group=8, symmetric=symmetric)(x)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("rounding", [in_groups(), InputRounding.of(INT8, group=2)], ids=["static", "contiguous"])
def test_rounding_in_groups_follows_a_permutation(rounding):
    x, order = 10 * random(3, 4), torch.tensor([2, 0, 3, 1])
    assert torch.equal(rounding.permuted(order)(x[:, order]), rounding(x)[:, order])


def test_a_layer_with_groups_of_inputs_is_stored_and_read_exactly():
    rounding = in_groups()
    layer = CompressedLinear(quantize(random(3, 4), INT8, "channel"), None)
    layer.round_inputs(rounding)
    tensors = layer.tensors()
    assert {name: tensors[name].dtype for name in ("input_zero_point", "input_g_idx", "input_scale")} == {
        "input_zero_point": torch.int8,
        "input_g_idx": torch.int32,
        "input_scale": torch.float32,
    }
    _, transforms = type(layer.scheme).from_json(layer.scheme.to_json()).read(tensors)
    assert transforms[0].sha256() == rounding.sha256() and transforms[0].scheme.text == (
        "inputs int4 in 2 groups of channels"
    )
    tensors["input_g_idx"] = torch.tensor([0, 1, 0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="input_g_idx holds groups from 0 to 2, but the layer has 2 groups"):
        layer.scheme.read(tensors)


def test_groups_exclude_other_ways_to_divide_channels():
    for other in ({"scale": "group", "group": 2}, {"columns": True}, {"threshold": 6.0}):
        with pytest.raises(ValueError, match="groups of rounding exclude scale 'group' and outlier columns"):
            RoundingScheme(INT8, groups=2, **other).check()


def test_kernels_leave_groups_of_channels_to_torch():
    part, x = CodesPart.of(quantize(random(8, 64), INT8, "channel")), random(2, 64)
    groups = InputRounding.of_groups(INT8, torch.arange(64) % 2, 2, True, None, torch.float32)
    assert dispatch.kernel_name(part, x, groups) == dispatch.TORCH
    assert torch.equal(dispatch.linear(x, [part], groups, None), part.product(groups(x)))
    assert not groups.computes_like(groups)
