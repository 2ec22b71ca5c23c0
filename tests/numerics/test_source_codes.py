"""Codes of a source that is quantized already stay as they are while the weight has not changed."""

import pytest
import torch

from compress.numerics.quant.codes import SourceCodes, quantize
from compress.numerics.quant.grids import GRIDS

GRID = GRIDS["mxfp4"]


def source(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    codes = quantize(torch.randn(6, 64, generator=draw), GRID, 32)
    return SourceCodes(codes, codes.dense(torch.float32).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_stay_while_the_weight_is_that_of_the_source(dtype):
    found = source(dtype)
    weight = found.weight.float()
    assert found.kept(weight, quantize(weight, GRID, 32)).codes is found.codes.codes
    changed = weight.clone()
    changed[0, 0] += 1
    assert found.kept(changed, quantize(changed, GRID, 32)) is None


@pytest.mark.parametrize(("grid", "size"), [("fp4_e2m1", 32), ("int4", 32), ("nvfp4", 16)])
def test_codes_of_another_kind_do_not_stay(grid, size):
    found = source()
    assert found.kept(found.weight, quantize(found.weight, GRIDS[grid], size)) is None


def test_rows_have_the_codes_and_scales_of_these_rows():
    found, rows = source(), slice(2, 5)
    part = found.rows(rows)
    assert torch.equal(part.codes.codes, found.codes.codes[rows])
    assert torch.equal(part.codes.scale, found.codes.scale[rows])
    assert part.kept(found.weight[rows], quantize(found.weight[rows], GRID, 32)) is not None


def test_one_scale_of_a_matrix_is_that_of_its_rows():
    codes = quantize(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), GRIDS["fp8_e4m3"], "tensor")
    part = SourceCodes(codes, codes.dense()).rows(slice(1, 3))
    assert torch.equal(part.codes.dense(), codes.dense()[1:3])
