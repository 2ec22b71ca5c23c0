"""Refined planes: the best scales and signs of small layers, no row worse, groups of any columns, stored scales."""

import itertools
from dataclasses import replace

import pytest
import torch
from draws import random

from compress.numerics.quant.codes import Codes
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.refine_planes import refined_planes

BINARY = GRIDS["binary"]


def planes_of(signs, scales, group_size, index=None):
    """Codes of planes: signs [out, in, planes], scales [out, groups, planes]."""
    return [
        Codes((signs[..., i] > 0).to(torch.uint8), scales[..., i].contiguous(), None, BINARY, group_size, index)
        for i in range(signs.shape[-1])
    ]


def dense(planes):
    return sum(plane.dense() for plane in planes)


def errors(weight, hessian, actual):
    residual = weight - actual
    return ((residual @ hessian) * residual).sum(1)


def hessian_of(width, seed=0):
    rows = random(200, width, seed=seed) + 0.7 * random(200, 1, seed=seed + 1)
    return rows.T @ rows / 100


def problem(rows=5, width=12, planes=2, groups=3, seed=0):
    weight, signs = random(rows, width, seed=seed), random(rows, width, planes, seed=seed + 1).sign()
    return weight, planes_of(signs, random(rows, groups, planes, seed=seed + 2).abs() + 0.1, width // groups)


def test_by_hand():
    # two weights, two planes, no correlation: 3 and 1 are 2 + 1 and 2 - 1
    start = planes_of(torch.tensor([[[1.0, 1.0], [1.0, -1.0]]]), torch.tensor([[[1.0, 0.5]]]), 2)
    actual = refined_planes(torch.tensor([[3.0, 1.0]]), start, torch.eye(2), 1, torch.float32)
    assert [plane.scale.item() for plane in actual] == pytest.approx([2.0, 1.0])
    assert [plane.codes.tolist() for plane in actual] == [[[1, 1]], [[1, 0]]]


def test_signs_turn_where_the_best_scale_is_negative():
    # as above, but with the second plane the other way round: 2 - (-1) and 2 - 1
    start = planes_of(torch.tensor([[[1.0, -1.0], [1.0, 1.0]]]), torch.tensor([[[1.0, 0.5]]]), 2)
    actual = refined_planes(torch.tensor([[3.0, 1.0]]), start, torch.eye(2), 1, torch.float32)
    assert [plane.scale.item() for plane in actual] == pytest.approx([2.0, 1.0])
    assert [plane.codes.tolist() for plane in actual] == [[[1, 1]], [[1, 0]]]


@pytest.mark.parametrize("second", [1.0, -1.0])
def test_a_group_of_one_column_keeps_scales_of_its_size(second):
    """Both planes have equal or opposite signs there, so that only the sum or the difference of their scales counts."""
    weight, hessian = random(256, 36), hessian_of(36)
    index = (torch.arange(36) % 9 == 4).to(torch.int32) + 2 * (torch.arange(36) // 9)
    signs = random(256, 36, 2, seed=5).sign()
    signs[:, 4::9, 0], signs[:, 4::9, 1] = 1.0, second
    start = planes_of(signs, random(256, 8, 2, seed=6).abs() + 0.5, 8, index.to(torch.int32))
    actual = refined_planes(weight, start, hessian, 1, torch.float32)
    assert max(float(plane.scale.max()) for plane in actual) < 2 * float(weight.abs().max())
    changed = torch.stack([(a.scale != b.scale).any(1) for a, b in zip(actual, start, strict=True)]).any(0)
    assert changed.float().mean() > 0.9


@pytest.mark.parametrize("planes", [1, 2, 3])
def test_no_row_is_worse_after_a_round(planes):
    weight, actual = problem(planes=planes)
    hessian = hessian_of(12)
    last_result = errors(weight, hessian, dense(actual))
    for order in (None, torch.arange(12).flip(0), None):
        actual = refined_planes(weight, actual, hessian, 1, torch.float32, order)
        current = errors(weight, hessian, dense(actual))
        assert (current <= last_result * (1 + 1e-5)).all()
        last_result = current
    assert refined_planes(weight, actual, hessian, 0, torch.float32)[0].scale.equal(actual[0].scale)


def test_the_scales_of_all_groups_are_the_best_ones():
    weight, start = problem(rows=3, width=8, groups=2)
    hessian = hessian_of(8)
    actual = refined_planes(weight, start, hessian, 40, torch.float32)
    base = errors(weight, hessian, dense(actual))
    for plane, group, factor in itertools.product(range(2), range(2), (0.98, 1.02)):
        scale = actual[plane].scale.clone()
        scale[:, group] *= factor
        moved = [replace(item, scale=scale) if i == plane else item for i, item in enumerate(actual)]
        assert (errors(weight, hessian, dense(moved)) >= base * (1 - 1e-4)).all()


def test_at_the_end_no_sign_of_one_weight_is_better():
    weight, start = problem(rows=2, width=6, groups=1)
    hessian = hessian_of(6)
    actual = refined_planes(weight, start, hessian, 60, torch.float32)
    base = errors(weight, hessian, dense(actual))
    for column in range(6):
        for signs in itertools.product((0, 1), repeat=2):
            codes = [plane.codes.clone() for plane in actual]
            for item, sign in zip(codes, signs, strict=True):
                item[:, column] = sign
            moved = [replace(plane, codes=item) for plane, item in zip(actual, codes, strict=True)]
            assert (errors(weight, hessian, dense(moved)) >= base * (1 - 1e-4)).all()


def test_groups_of_any_columns_and_scales_in_their_stored_dtype():
    weight, start = problem()
    index = torch.tensor([2, 0, 1] * 4, dtype=torch.int32)
    start = [replace(plane, group_index=index) for plane in start]
    actual = refined_planes(weight, start, hessian_of(12), 2, torch.bfloat16)
    for plane, old in zip(actual, start, strict=True):
        assert torch.equal(plane.group_index, index)
        changed = plane.scale != old.scale
        assert torch.equal(plane.scale[changed].to(torch.bfloat16).float(), plane.scale[changed])
    original, updated = (errors(weight, hessian_of(12), dense(item)) for item in (start, actual))
    assert (updated < original).all()
