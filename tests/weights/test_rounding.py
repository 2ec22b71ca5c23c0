"""Rounding of inputs: the scale of each token or a stored one, and columns that are spared, against integer products."""

import pytest
import torch
from draws import random

from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.inputs import outlier_columns
from compress.weights.transforms.rounding import InputRounding

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
