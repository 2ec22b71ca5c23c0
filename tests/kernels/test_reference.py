"""The reference kernel against (code - zero) * scale, written out element by element."""

import pytest
import torch
from draws import random
from tolerances import near

from compress.kernels import reference
from compress.layers.parts.codes import CodesPart
from compress.numerics.quant.codes import Codes, quantize
from compress.numerics.quant.grids import GRIDS


def test_a_weight_by_hand():
    codes = torch.tensor([[-8, 7, 0, 1], [3, -3, 2, -2]], dtype=torch.int8)
    scale, zero = torch.tensor([[0.5, 2.0], [1.0, 0.25]]), torch.tensor([[1.0, 0.0], [-1.0, 2.0]])
    packed = CodesPart.of(Codes(codes, scale, zero, GRIDS["int4"], 2))
    expected = [[-4.5, 3.0, 0.0, 2.0], [4.0, -2.0, 0.0, -1.0]]
    assert packed.dense(torch.float32).tolist() == expected
    x, bias = torch.tensor([[1.0, 0.0, 2.0, 1.0]]), torch.tensor([10.0, 20.0])
    assert reference.linear(x, [packed], None, bias).tolist() == [[7.5, 23.0]]
    assert reference.linear(x, [packed], None, None).tolist() == [[-2.5, 3.0]]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [4, 5, 16, "channel", "tensor"])
@pytest.mark.parametrize("grid", ["int2", "int3", "int4", "int5", "int8"])
def test_integers_with_any_groups(grid, group_size, symmetric):
    codes = quantize(random(6, 16), GRIDS[grid], group_size, symmetric)
    actual = CodesPart.of(codes).dense(torch.float32)
    size = group_size if isinstance(group_size, int) else 16
    for row in range(6):
        for column in range(16):
            at = (0 if group_size == "tensor" else row, column // size)
            zero = 0 if codes.zero is None else float(codes.zero[at])
            expected = (float(codes.codes[row, column]) - zero) * float(codes.scale[at])
            assert float(actual[row, column]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("grid", ["nf4", "fp4_e2m1", "fp8_e4m3"])
def test_other_grids(grid):
    codes = quantize(random(6, 16), GRIDS[grid], 8)
    assert torch.equal(CodesPart.of(codes).dense(torch.float32), codes.dense())


def test_groups_by_an_index():
    index = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    codes = Codes(torch.ones(1, 4, dtype=torch.int8), torch.tensor([[2.0, 3.0]]), None, GRIDS["int4"], 2, index)
    assert CodesPart.of(codes).dense(torch.float32).tolist() == [[3, 2, 3, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_that_of_the_input(dtype):
    packed = CodesPart.of(quantize(random(6, 16), GRIDS["int4"], 8))
    x = random(2, 3, 16, seed=1).to(dtype)
    actual = reference.linear(x, [packed], None, None)
    assert actual.dtype == dtype and actual.shape == (2, 3, 6)
    assert near(actual, x @ packed.dense(dtype).T)
