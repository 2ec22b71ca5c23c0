"""Loops over columns in C++, against the same loops in plain torch."""

import ctypes

import pytest
import torch
from column_cases import (
    GROUPS,
    LEVELS,
    check_gptq,
    check_layouts,
    check_levels,
    check_nan,
    check_search,
    expected,
    nearest_level,
    problem,
    same,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from products import SETS, random

from compress.native import columns as native
from compress.native.columns import ScaledGrid
from compress.native.library import Columns, Groups, library, pointer

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")

COUNTS = st.sampled_from([1, 2, 15, 16, 17, 33, 64])


@settings(max_examples=60)
@given(COUNTS, COUNTS, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99))
def test_a_sweep_is_that_of_plain_torch(rows, columns, shared, zeros, masked, seed):
    state, matrix, grid, keep = problem(rows, columns, shared, zeros, masked, seed)
    original = state.clone()
    same(native.sweep(state, matrix, grid, keep, with_targets=True), expected(state, matrix, grid, keep))
    assert torch.equal(state, original)


@settings(max_examples=60)
@given(COUNTS, COUNTS, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99))
def test_a_descent_is_that_of_plain_torch(rows, columns, shared, zeros, masked, seed):
    state, matrix, grid, keep = problem(rows, columns, shared, zeros, masked, seed)
    old, pivots = random(columns, rows, seed=seed + 6), 1 + random(columns, seed=seed + 7).abs()
    actual = native.descend(state, old, matrix, pivots, grid, keep)
    same(actual, expected(state, matrix, grid, keep, old, pivots))
    assert actual.targets is None


@settings(max_examples=60)
@given(COUNTS, st.integers(1, 4), COUNTS, st.booleans(), st.booleans(), st.integers(0, 99))
def test_sums_of_groups(rows, groups, size, zeros, summed, seed):
    weight, importance = random(rows, groups, size, seed=seed), random(groups, size, seed=seed + 1).abs()
    scale = (0.1 + random(rows, groups, seed=seed + 2).abs()) * (1 if seed % 2 else -1)
    zero = random(rows, groups, seed=seed + 3).mul(2).round() if zeros else None
    level = (weight / scale[..., None] + (0 if zero is None else zero[..., None])).round().clamp(-8, 7)
    level = level - (0 if zero is None else zero[..., None])
    expected = [(level * scale[..., None] - weight).square(), level.square(), level * weight][: 3 if summed else 1]
    actual = native.group_sums(weight, importance, ScaledGrid((-8, 7), scale, zero), summed)
    assert len(actual) == len(expected)
    for mine, alternative in zip(actual, expected, strict=True):
        assert torch.allclose(mine, (importance * alternative).sum(-1), rtol=1e-4, atol=1e-4)


GRIDS = [(-8, 7, False), (-2, 1, False), (-128, 127, False), (0, 15, True), (0, 255, True)]


@pytest.mark.parametrize(("lowest", "highest", "has_zero"), GRIDS)
def test_sums_of_groups_round_quotients_next_to_a_tie_as_a_division_does(chosen, lowest, highest, has_zero):
    scale = 0.01 + random(40, 19).abs()
    zero = (random(40, 19, seed=1).abs() * highest / 3).round().clamp(lowest, highest) if has_zero else None
    middle = torch.arange(48).sub(24).mul(max(1, (highest - lowest) // 40)) + 0.5
    tie = middle * scale[..., None]
    near = torch.stack([tie, tie.nextafter(tie + 1), tie.nextafter(tie - 1)]).unbind()
    for weight in near:
        level = (weight / scale[..., None] + (0 if zero is None else zero[..., None])).round().clamp(lowest, highest)
        level -= 0 if zero is None else zero[..., None]
        grid = ScaledGrid((lowest, highest), scale, zero)
        squares = native.group_sums(weight, torch.ones(19, 48), grid, True)[1]
        assert torch.equal(squares, level.square().sum(-1))  # whole numbers, so exact in any order


@pytest.mark.parametrize("size", [1e-38, 1e-41, 1e35])
def test_sums_of_groups_divide_where_the_inverse_of_a_scale_is_no_normal_number(chosen, size):
    scale, level = torch.full((3, 17), size), torch.arange(32).sub(16).remainder(16).sub(8).float()
    _, squares, _ = native.group_sums(level * scale[..., None], torch.ones(17, 32), ScaledGrid((-8, 7), scale), True)
    assert torch.equal(squares, level.square().sum().expand(3, 17))


@settings(max_examples=60)
@given(COUNTS, COUNTS, st.sampled_from(LEVELS), st.booleans(), st.integers(0, 99))
def test_columns_of_levels_are_those_of_plain_torch(rows, columns, levels, masked, seed):
    check_levels(rows, columns, levels, masked, seed)


@settings(max_examples=60)
@given(COUNTS, st.integers(1, 4), COUNTS, st.sampled_from(LEVELS), st.booleans(), st.integers(0, 99))
def test_sums_of_groups_of_levels(rows, groups, size, levels, summed, seed):
    weight, importance = random(rows, groups, size, seed=seed), random(groups, size, seed=seed + 1).abs()
    scale = (0.1 + random(rows, groups, seed=seed + 2).abs()) * (1 if seed % 2 else -1) / max(levels)
    level = nearest_level(weight / scale[..., None], levels)[1]
    expected = [(level * scale[..., None] - weight).square(), level.square(), level * weight][: 3 if summed else 1]
    grid = ScaledGrid((0, len(levels) - 1), scale, None, levels)
    for mine, alternative in zip(native.group_sums(weight, importance, grid, summed), expected, strict=True):
        assert torch.allclose(mine, (importance * alternative).sum(-1), rtol=1e-4, atol=1e-4)


def test_levels_in_every_instruction_set(chosen):
    for levels in LEVELS:
        check_levels(40, 33, levels, True, 1)
    state = torch.tensor([[0.0, 5.5, 5.6, -5.5, 200.0, -200.0, 1.0]])
    grid = ScaledGrid((0, 3), torch.ones(7), None, (-10.0, -1.0, 1.0, 10.0))
    actual = native.sweep(state, torch.zeros(1, 1), grid)
    assert actual.codes.tolist() == [[1, 2, 3, 0, 3, 0, 2]]  # a number in the middle belongs to the lower level
    assert actual.values.tolist() == [[-1, 1, 10, -10, 10, -10, 1]]


def test_every_instruction_set(chosen):
    for rows, columns in ((5, 3), (16, 128), (40, 256)):
        state, matrix, grid, keep = problem(rows, columns, False, True, True, rows)
        matrix /= columns**0.5
        same(native.sweep(state, matrix, grid, keep, with_targets=True), expected(state, matrix, grid, keep))
    weight, scale = random(7, 3, 40), 0.2 + random(7, 3).abs()
    [error] = native.group_sums(weight, torch.ones(3, 40), ScaledGrid((-4, 3), scale), False)
    codes = (weight / scale[..., None]).round().clamp(-4, 3)
    assert torch.allclose(error, (codes * scale[..., None] - weight).square().sum(-1), rtol=1e-5)


def test_ties_go_to_the_even_code(chosen):
    state = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 7.5, 100.0, -100.0]])
    actual = native.sweep(state, torch.zeros(1, 1), ScaledGrid((-8, 7), torch.ones(8)))
    assert actual.codes.tolist() == [[0, 2, 2, 0, -2, 7, 7, -8]]


def test_nan_stays_in_its_row(chosen):
    check_nan()


def test_tensors_that_are_not_contiguous_and_none_at_all():
    check_layouts()


def test_more_threads_than_rows():
    state, matrix, grid, keep = problem(33, 200, False, False, False, 3)
    expected, original = native.sweep(state, matrix / 20, grid, keep), torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        assert torch.equal(native.sweep(state, matrix / 20, grid, keep).codes, expected.codes)
    finally:
        torch.set_num_threads(original)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("group", "order", "regroup"), GROUPS)
@pytest.mark.parametrize("masked", [False, True])
def test_gptq_and_its_refinement_are_those_of_plain_torch(plain, symmetric, group, order, regroup, masked):
    check_gptq(plain, symmetric, group, order, regroup, masked)


@pytest.mark.parametrize("grid", ["iq4_nl", "nf4", "ternary"])
@pytest.mark.parametrize(("group", "order", "regroup"), GROUPS)
def test_gptq_with_levels_is_that_of_plain_torch(plain, grid, group, order, regroup):
    check_gptq(plain, True, group, order, regroup, False, grid=grid)


@pytest.mark.parametrize(("grid", "symmetric"), [("int4", True), ("int4", False), ("iq4_nl", True), ("nf4", True)])
def test_the_search_for_scales_is_that_of_plain_torch(plain, grid, symmetric):
    check_search(plain, symmetric, grid=grid)


def test_what_the_library_takes():
    int4 = ScaledGrid((-8, 7), torch.ones(1))
    assert native.usable(torch.zeros(1), int4) and not native.usable(torch.zeros(1, dtype=torch.float64), int4)
    assert not native.usable(torch.zeros(1), None) and not native.usable(torch.zeros(1, device="meta"), int4)
    assert not native.usable(torch.zeros(1, requires_grad=True), int4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", -1),
        ("columns", native.MAX_COLUMNS + 1),
        ("columns", -1),
        ("matrix_stride", 3),
        ("scale_stride", 2),
        ("threads", 0),
        ("pivots", None),
        ("old", None),
        ("entries", 1),
    ],
)
def test_the_library_checks_the_sizes_of_columns(name, value):
    x = torch.ones(4, 3)
    fields = dict.fromkeys(("state", "scale", "old", "codes", "values", "moves"), pointer(x))
    good = {
        **fields,
        "matrix": pointer(m := torch.zeros(4, 4)),
        "pivots": pointer(x),
        "rows": 3,
        "columns": 4,
        "scale_stride": 3,
        "matrix_stride": len(m),
        "lowest": -8,
        "highest": 7,
        "threads": 1,
    }
    call = library().compress_round_columns
    assert call(ctypes.addressof(first_result := Columns(**good))) == 0 and first_result
    assert call(ctypes.addressof(wrong := Columns(**good | {name: value}))) == -1 and wrong


@pytest.mark.parametrize(
    ("name", "value"), [("rows", -1), ("groups", -1), ("size", -1), ("threads", 0), ("products", None), ("entries", 1)]
)
def test_the_library_checks_the_sizes_of_groups(name, value):
    x = torch.ones(2, 3, 4)
    fields = dict.fromkeys(("weights", "scale", "importance", "error", "squares", "products"), pointer(x))
    good = {**fields, "rows": 2, "groups": 3, "size": 4, "lowest": -8, "highest": 7, "threads": 1}
    call = library().compress_sum_groups
    assert call(ctypes.addressof(first_result := Groups(**good))) == 0 and first_result
    assert call(ctypes.addressof(wrong := Groups(**good | {name: value}))) == -1 and wrong


def test_sizes_that_do_not_fit_together():
    state, matrix, grid, keep = problem(5, 4, False, True, True, 0)
    for arguments in (
        (state[:3], matrix, grid, keep),
        (state, matrix[:3, :3], grid, keep),
        (state, matrix, grid, keep[:3]),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            native.sweep(*arguments)
    with pytest.raises(ValueError, match="do not fit"):
        native.group_sums(random(2, 3, 4), random(2, 4), ScaledGrid((-8, 7), random(2, 3)), True)
