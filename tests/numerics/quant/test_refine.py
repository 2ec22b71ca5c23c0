"""Refinement after a sweep: worked cases, least squares against lstsq, descent to a local optimum."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from draws import correlated, random, seen_of

from compress.numerics.linalg import damped
from compress.numerics.quant.codes import Codes, quantize, spread
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.refine import refined, refined_sum, refits

WIDTH = 40
WHOLE = torch.float32


def row_errors(weight, hessian, codes):
    """d H d^T of each row, with d the difference of the weight and its dequantized codes."""
    difference = weight - codes.dense()
    return (difference @ hessian).mul_(difference).sum(1)


def hessian_of(rows):
    return damped(seen_of(rows).hessian, 0.01)


def int_codes(values, scale, name="int4", group_size="channel"):
    codes = torch.tensor(values, dtype=torch.int8)
    return Codes(codes, torch.tensor(scale), None, GRIDS[name], group_size)


def test_the_scale_of_independent_inputs_is_the_regression_on_the_codes():
    # codes 1 and -2 for 1.1 and -1.8 with scale 1: (1.1 + 3.6) / (1 + 4) = 0.94
    actual = refined(torch.tensor([[1.1, -1.8]]), int_codes([[1, -2]], [[1.0]]), torch.eye(2), 1, WHOLE)
    assert actual.scale.item() == pytest.approx(0.94)
    assert actual.codes.tolist() == [[1, -2]]
    half = refined(torch.tensor([[1.1, -1.8]]), int_codes([[1, -2]], [[1.0]]), torch.eye(2), 1, torch.bfloat16)
    assert half.scale.item() == torch.tensor(0.94).bfloat16().item()


def test_a_code_is_decided_again_when_the_errors_of_later_columns_exist():
    # inputs 1 and 2 are nearly equal: only the sum of both weights matters, 0.45 + 0.45 = 0.9
    hessian = torch.tensor([[1.0, 0.99], [0.99, 1.0]])
    start = int_codes([[0, 0]], [[1.0]])
    assert row_errors(torch.tensor([[0.45, 0.45]]), hessian, start).item() == pytest.approx(0.806, abs=1e-3)
    actual = refined(torch.tensor([[0.45, 0.45]]), start, hessian, 1, WHOLE)
    assert sorted(actual.codes[0].tolist()) == [0, 1]


def refined_one_by_one(weight, codes, hessian, part=128, turns=2):
    """The same in float64: a scale or a code at a time, each the best for the present values of all others."""
    weight, hessian, scale = weight.double(), hessian.double(), codes.scale.double()
    width = weight.shape[1]
    size = codes.group_size if isinstance(codes.group_size, int) else width
    zero = torch.zeros_like(scale) if codes.zero is None else codes.zero.double()
    levels = codes.codes.double() - spread(zero, width, codes.group_size)
    low = codes.grid.lowest_stored

    def slope(columns):
        return (weight - levels * spread(scale, width, codes.group_size)) @ hessian[:, columns]

    groups = [range(start, min(start + size, width)) for start in range(0, width, size)]
    together = max(1, part // size)
    for first in range(0, len(groups), together):
        for _ in range(turns if size <= 256 else 1):
            for i, columns in list(enumerate(groups))[first : first + together]:
                part_levels, inside = levels[:, columns], list(columns)
                curvature = ((part_levels @ hessian[inside][:, inside]) * part_levels).sum(1)
                best = scale[:, i] + (part_levels * slope(inside)).sum(1) / curvature
                scale[:, i] = torch.where(best > 0, best, scale[:, i])
                for column in columns:
                    target = levels[:, column] * scale[:, i] + slope(column) / hessian[column, column]
                    code = (target / scale[:, i] + zero[:, i]).round().clamp(low, low + 2**codes.grid.bits - 1)
                    levels[:, column] = code - zero[:, i]
    dense = levels * spread(scale, width, codes.group_size)
    return ((weight - dense) @ hessian * (weight - dense)).sum(1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("width", "group_size"), [(40, 16), (40, "channel"), (300, "channel"), (640, 4), (600, 2)])
def test_a_round_equals_single_steps_in_float64(width, group_size, symmetric):
    """Also with 160 and 300 groups, and where a group is wider than a part."""
    rows, weight = correlated(width=width), random(3, width, seed=1)
    hessian = damped(rows.T @ rows, 0.1)
    start = quantize(weight, GRIDS["int4"], group_size, symmetric)
    actual = refined(weight, start, hessian, 1, WHOLE)
    expected = refined_one_by_one(weight, start, hessian)
    torch.testing.assert_close(row_errors(weight, hessian, actual).double(), expected, rtol=0.03, atol=0)
    assert (row_errors(weight, hessian, actual) < row_errors(weight, hessian, start)).all()


@pytest.mark.parametrize("name", ["int2", "int3", "int4", "nf4", "fp4_e2m1", "nvfp4", "uint4"])
def test_no_row_gets_worse_and_the_end_is_a_local_optimum(name):
    grid = GRIDS[name]
    weight, hessian, size = random(6, 64, seed=2), hessian_of(correlated(width=64)), grid.group_size or 16
    start = quantize(weight, grid, size, not grid.offset)
    original, last_result = row_errors(weight, hessian, start), start
    for _ in range(25):
        actual = refined(weight, last_result, hessian, 1, WHOLE)
        errors = row_errors(weight, hessian, actual)
        assert (errors <= original * (1 + 1e-4)).all()
        original, last_result = errors, actual
    assert errors.sum() < 0.6 * row_errors(weight, hessian, start).sum()
    low = grid.lowest_stored
    for column, step in product(range(0, 64, 7), (-1, 1)):  # no neighbour of a code is better
        changed = actual.codes.to(torch.int16)
        changed[:, column] = (changed[:, column] + step).clamp(low, low + 2**grid.bits - 1)
        alternative = replace(actual, codes=changed.to(actual.codes.dtype))
        assert (row_errors(weight, hessian, alternative) >= errors * (1 - 1e-4)).all()


def test_from_every_start_the_best_of_all_codes_is_a_fixed_point():
    rows, weight = correlated(width=4), random(1, 4, seed=5)
    hessian, grid = hessian_of(rows), GRIDS["int2"]
    scale = torch.tensor([[0.7]])
    errors = {
        values: row_errors(
            weight, hessian, Codes(torch.tensor([values], dtype=torch.int8), scale, None, grid, 4)
        ).item()
        for values in product(range(-2, 2), repeat=4)
    }
    best = min(errors, key=errors.__getitem__)
    start = Codes(torch.tensor([best], dtype=torch.int8), scale, None, grid, 4)
    actual = refined(weight, start, hessian, 3, WHOLE)
    assert row_errors(weight, hessian, actual).item() <= errors[best]
    assert actual.codes.tolist() == [list(best)] or row_errors(weight, hessian, actual).item() < errors[best]


def test_the_mask_stays_and_groups_of_any_columns_work():
    weight, mask, rows = random(6, WIDTH), random(6, WIDTH, seed=1) > 0, correlated()
    index = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0)).int() % 3
    scale = random(6, 3, seed=4).abs() + 0.1
    grid = GRIDS["int4"]
    codes = grid.encode(weight * mask, scale[:, index.long()], None).to(torch.int8)
    start = Codes(codes, scale, None, grid, 16, index)
    actual = refined(weight * mask, start, hessian_of(rows), 2, WHOLE, mask, torch.arange(WIDTH).flip(0))
    assert (actual.dense()[~mask] == 0).all() and torch.equal(actual.group_index, index)
    original, updated = (row_errors(weight * mask, hessian_of(rows), item) for item in (start, actual))
    assert (updated < original).all()


def test_negative_scales_only_where_they_are_allowed():
    # the codes have the wrong sign throughout
    weight, start = torch.tensor([[3.0, -2.0, 1.0, 4.0]]), int_codes([[-3, 2, -1, -4]], [[1.0]])
    assert refined(weight, start, torch.eye(4), 1, WHOLE).scale.item() > 0
    turned = refined(weight, start, torch.eye(4), 1, WHOLE, signed=True)
    assert turned.scale.item() == pytest.approx(-1)
    torch.testing.assert_close(turned.dense(), weight)


def test_what_has_no_scales_of_its_own_keeps_them():
    hessian = hessian_of(correlated())
    weight = random(5, WIDTH)
    for name, size in (("int4", "tensor"), ("nvfp4", 16), ("uint4", 16)):
        start = quantize(weight, GRIDS[name], size, name != "uint4")
        actual = refined(weight, start, hessian, 1, WHOLE)
        assert not refits(start) and torch.equal(actual.scale, start.scale)
        assert row_errors(weight, hessian, actual).sum() < row_errors(weight, hessian, start).sum()


def test_a_group_of_zeros_keeps_its_scale_and_no_round_changes_nothing():
    weight = random(3, 32)
    weight[1, :16] = 0
    start = quantize(weight, GRIDS["int4"], 16)
    actual = refined(weight, start, hessian_of(correlated(width=32)), 2, WHOLE)
    assert actual.scale.isfinite().all()
    assert refined(weight, start, torch.eye(32), 0, WHOLE) is start


def test_the_terms_of_a_sum_are_refined_for_what_the_others_leave():
    weight, rows = random(6, WIDTH), correlated()
    hessian, mask = hessian_of(rows), random(6, WIDTH, seed=1) > 1
    coarse, fine = GRIDS["binary"], GRIDS["int4"]
    first_result = Codes((weight > 0).to(torch.uint8), weight.abs().mean(1, keepdim=True), None, coarse, "channel")
    scale = torch.full((6, 1), 0.3)
    residual = (weight - first_result.dense()) * mask
    second = Codes(fine.encode(residual, scale, None).to(torch.int8), scale, None, fine, "channel")

    def error(terms):
        difference = weight - sum(term.dense() for term in terms)
        return ((difference @ hessian) * difference).sum(1)

    actual = [first_result, second]
    for _ in range(3):
        original = error(actual)
        actual = refined_sum(weight, actual, hessian, 1, WHOLE, (None, mask))
        assert (error(actual) <= original * (1 + 1e-5)).all()
        assert not bool(actual[1].dense()[~mask].any())
    assert float(error(actual).sum()) < 0.5 * float(error([first_result, second]).sum())
    alone = refined_sum(weight, [first_result], hessian, 2, WHOLE)
    assert torch.equal(alone[0].dense(), refined(weight, first_result, hessian, 2, WHOLE).dense())
