"""Codes: groups of columns, scales per group, masks and the clipping search, against a loop over single weights."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from draws import random
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compress.numerics.quant import codes as codes_module
from compress.numerics.quant.codes import (
    MSE_NORM,
    Codes,
    Percentile,
    fit,
    fit_shared,
    grouped,
    groups_in,
    quantize,
    spread,
    store,
    vanished,
)
from compress.numerics.quant.grids import GRIDS

SIZES = ["tensor", "channel", 1, 3, 4, 8, 64]  # of 11 columns: 3, 4 and 8 leave a short last group, 64 is one group
GRID = st.sampled_from(list(GRIDS.values()))
WITH_ZERO = st.sampled_from([grid for grid in GRIDS.values() if grid.has_zero])
quick = settings(max_examples=60)


def layout(grid, group_size):
    """(group size, columns) of a test: those of super-blocks are fixed."""
    return (group_size, 11) if grid.block == 1 else (grid.group_size, 2 * grid.block)


def units(rows, width, group_size):
    """The (row, column) lists of every group, with the place of its scale."""
    if group_size == "tensor":
        return [((0, 0), [(i, j) for i in range(rows) for j in range(width)])]
    size = width if group_size == "channel" else group_size
    return [
        ((i, g), [(i, j) for j in range(g * size, min((g + 1) * size, width))])
        for i in range(rows)
        for g in range(-(-width // size))
    ]


def loop(weight, bits, group_size, symmetric):
    """(codes, scale, zero, dense) of integers, one weight at a time, in float32 as the conventions say."""
    weight = weight.numpy()
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    codes, dense = np.zeros(weight.shape, np.int8), np.zeros(weight.shape, np.float32)
    scales, zeros = {}, {}
    for place, members in units(*weight.shape, group_size):
        values = [weight[at] for at in members]
        low, high = np.float32(min(0, *values, 0)), np.float32(max(0, *values, 0))
        steps = np.float32(2**bits - 1)
        scale = max(-low, high) / np.float32(steps / 2) if symmetric else (high - low) / steps
        scale = scale or np.finfo(np.float32).eps
        zero = np.float32(0) if symmetric else np.clip(np.rint(np.float32(lowest) - low / scale), lowest, highest)
        scales[place], zeros[place] = scale, zero
        for at in members:
            codes[at] = np.clip(np.rint(weight[at] / scale + zero), lowest, highest)
            dense[at] = (np.float32(codes[at]) - zero) * scale
    groups = 1 + max(g for _, g in scales)
    rows = 1 + max(i for i, _ in scales)
    table = [[[values[i, g] for g in range(groups)] for i in range(rows)] for values in (scales, zeros)]
    return torch.from_numpy(codes), torch.tensor(table[0]), torch.tensor(table[1]), torch.from_numpy(dense)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", SIZES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_integers_are_those_of_the_loop(bits, group_size, symmetric):
    weight = random(5, 11, seed=bits)
    weight[1] = 0  # groups of zeros
    weight[2] = weight[2].abs()  # ranges on one side of zero
    actual = quantize(weight, GRIDS[f"int{bits}"], group_size, symmetric)
    codes, scale, zero, dense = loop(weight, bits, group_size, symmetric)
    assert actual.codes.dtype == torch.int8
    assert torch.equal(actual.codes, codes)
    assert torch.equal(actual.scale, scale)
    assert (actual.zero is None) if symmetric else torch.equal(actual.zero, zero)
    assert torch.equal(actual.dense(), dense)


@quick
@given(grid=GRID, group_size=st.sampled_from(SIZES), symmetric=st.booleans(), seed=st.integers(0, 10**6))
def test_every_grid_rounds_each_group_as_if_it_were_alone(grid, group_size, symmetric, seed):
    symmetric = not grid.offset and (symmetric or grid.symmetric_only)
    group_size, width = layout(grid, group_size)
    weight = random(3, width, seed=seed)
    actual = quantize(weight, grid, group_size, symmetric)
    groups = actual.scale.shape[1]
    for place, members in units(3, width, group_size):
        alone = torch.stack([weight[at] for at in members])[None]
        low, high = (torch.full((actual.scale.shape[0], 1), float(end)) for end in alone.aminmax())
        shared = grid.scaling.part(actual.shared, actual.scale.shape[0], groups, place[1])
        scale, zero = grid.fit(low, high, symmetric, torch.float32, shared)
        scale, zero = scale[place[0], 0], None if zero is None else zero[place[0], 0]
        assert actual.scale[place] == scale
        codes = grid.encode(alone, scale, zero)
        assert torch.equal(torch.stack([actual.codes[at] for at in members]).float(), codes[0])


@quick
@given(grid=GRID, group_size=st.sampled_from(SIZES), symmetric=st.booleans(), seed=st.integers(0, 10**6))
def test_quantizing_the_dense_weight_again_changes_nothing(grid, group_size, symmetric, seed):
    symmetric = not grid.offset and (symmetric or grid.symmetric_only)
    group_size, width = layout(grid, group_size)
    first_result = quantize(random(3, width, seed=seed), grid, group_size, symmetric)
    zero = None if first_result.zero is None else spread(first_result.zero, width, group_size)
    again = grid.encode(first_result.dense(), spread(first_result.scale, width, group_size), zero)
    assert torch.equal(store(again, grid), first_result.codes)


@quick
@given(grid=WITH_ZERO, group_size=st.sampled_from(SIZES), symmetric=st.booleans(), seed=st.integers(0, 10**6))
def test_masked_weights_decode_to_exactly_zero_and_do_not_widen_the_range(grid, group_size, symmetric, seed):
    symmetric = not grid.offset and (symmetric or grid.symmetric_only)
    group_size, width = layout(grid, group_size)
    weight, mask = random(4, width, seed=seed), random(4, width, seed=seed + 1) > 0
    actual = quantize(torch.where(mask, weight, 1000.0), grid, group_size, symmetric, mask=mask)
    dense = actual.dense()
    assert (dense[~mask] == 0).all()
    assert torch.equal(dense, quantize(weight * mask, grid, group_size, symmetric).dense())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_codes_are_computed_from_the_scale_as_it_is_stored(dtype):
    weight = random(6, 32, seed=1)
    grid = GRIDS["int8"]
    actual = quantize(weight, grid, 8, dtype=dtype)
    assert torch.equal(actual.scale.to(dtype).float(), actual.scale)
    assert torch.equal(actual.codes.float(), grid.encode(weight, spread(actual.scale, 32, 8), None))
    exact = quantize(weight, grid, 8)
    assert not torch.equal(actual.codes, exact.codes)  # rounding the scale moves some codes


@quick
@given(grid=GRID, group_size=st.sampled_from(SIZES), symmetric=st.booleans(), seed=st.integers(0, 10**6))
def test_the_search_is_never_worse_than_the_whole_range_in_its_own_error(grid, group_size, symmetric, seed):
    assume(not grid.scaling.whole_groups)  # eight scales per tile are too few for such tails
    symmetric = not grid.offset and (symmetric or grid.symmetric_only)
    group_size, width = layout(grid, group_size)
    weight = random(3, width, seed=seed) ** 3

    def errors(search):
        difference = (quantize(weight, grid, group_size, symmetric, search).dense() - weight).abs() ** MSE_NORM
        if grid.block > 1:  # the groups of a super-block trade their errors
            return difference.sum()
        return torch.stack(
            [torch.stack([difference[at] for at in members]).sum() for _, members in units(3, width, group_size)]
        )

    assert (errors("mse") <= errors("absmax") * (1 + 1e-5) + 1e-12).all()


def test_the_search_cuts_off_a_lone_outlier():
    # 1000 weights of 0.55 and one of 1: with int2 and the whole range, scale 2/3, all are rounded to 2/3. Cut to 0.82 of
    # the range the scale is 0.5467, and the many are nearly exact while the one loses 0.45.
    weight = torch.cat([torch.full((1000,), 0.55), torch.tensor([1.0])])[None]
    grid = GRIDS["int2"]
    assert quantize(weight, grid, "channel").scale.item() == pytest.approx(2 / 3)
    actual = quantize(weight, grid, "channel", search="mse")
    tried = torch.tensor([1 - 0.6 * step / 30 for step in range(31)]) * 2 / 3
    error = [(grid.decode(grid.encode(weight, s, None), s, None) - weight).abs().pow(2.4).sum() for s in tried]
    assert actual.scale.item() == pytest.approx(tried[int(torch.stack(error).argmin())].item())
    assert actual.scale.item() == pytest.approx(0.82 * 2 / 3)


def test_the_search_also_moves_the_zero_point():
    weight = torch.cat([random(63, seed=2) * 0.1, torch.tensor([-4.0])])[None]
    scale, zero = fit(weight, GRIDS["int3"], "channel", False, "mse")
    wide, wide_zero = fit(weight, GRIDS["int3"], "channel", False, "absmax")
    assert scale < wide
    assert zero == torch.round(-4 - weight.min() * (scale * 7 / (weight.max() - weight.min())) / scale)
    assert wide_zero == torch.round(-4 - weight.min() / wide)


@pytest.mark.parametrize("name", ["mxfp4", "fp4_e2m1_pow2"])
@quick
@given(seed=st.integers(0, 10**6))
def test_the_search_finds_the_best_power_of_two(name, seed):
    # Shrinking to 0.4 reaches the exponent of the whole range and the one below it, and there are no others between.
    weight, grid = random(1, 32, seed=seed) ** 3, GRIDS[name]
    scale, _ = fit(weight, grid, "channel", True, "mse")
    top = fit(weight, grid, "channel", True)[0]
    reached = {
        float(grid.fit(-k * weight.abs().max(), k * weight.abs().max(), True, torch.float32)[0]) for k in (1, 0.4)
    }
    assert reached <= {float(top), float(top / 2), float(top / 4)}

    def error(tried):
        return float((grid.decode(grid.encode(weight, tried, None), tried, None) - weight).abs().pow(MSE_NORM).sum())

    assert float(scale) in reached | {float(top / 2)}
    assert error(scale) <= min(error(torch.tensor(item)) for item in reached) * (1 + 1e-6)


@pytest.mark.parametrize("group_size", [8, "channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_search_in_small_chunks_finds_the_same(monkeypatch, group_size, symmetric):
    weight = random(9, 40) ** 3
    expected = fit(weight, GRIDS["int3"], group_size, symmetric, "mse")
    monkeypatch.setattr(codes_module, "CHUNK", 96)
    actual = fit(weight, GRIDS["int3"], group_size, symmetric, "mse")
    assert torch.equal(actual[0], expected[0])
    assert symmetric or torch.equal(actual[1], expected[1])


def test_a_percentile_leaves_out_the_outermost_weights():
    weight = torch.arange(1.0, 101)[None] * torch.tensor([1.0, -1.0]).repeat(50)
    grid = GRIDS["int8"]
    scale, _ = fit(weight, grid, "channel", True, Percentile(percentile=0.9))
    assert scale.item() == pytest.approx(90 / 127.5)
    # -100, -98, .. -2, 1, 3, .. 99: the 90 lowest end at 79, the 90 highest begin at -80
    scale, zero = fit(weight, grid, "channel", False, Percentile(percentile=0.9))
    assert scale.item() == pytest.approx((79 + 80) / 255)
    assert zero.item() == round(-128 + 80 / scale.item())


@quick
@given(group_size=st.sampled_from(SIZES), symmetric=st.booleans(), seed=st.integers(0, 10**6))
def test_the_whole_percentile_is_the_whole_range(group_size, symmetric, seed):
    weight = random(3, 11, seed=seed)
    full, all_of_it = (
        fit(weight, GRIDS["int4"], group_size, symmetric, search) for search in ("absmax", Percentile(percentile=1.0))
    )
    assert torch.equal(full[0], all_of_it[0])
    assert symmetric or torch.equal(full[1], all_of_it[1])


def test_the_short_last_group_has_a_percentile_of_its_own():
    weight = torch.tensor([[1.0, 2, 3, 4, 100, 5, 6]])
    scale, _ = fit(weight, GRIDS["int8"], 5, True, Percentile(percentile=0.8))
    assert (scale * 127.5)[0].tolist() == pytest.approx([4, 6])


def test_the_largest_weight_beside_it_sets_the_shared_scale():
    weight, grid = random(4, 32), GRIDS["nvfp4"]
    actual = quantize(weight, grid, 16, shared_absmax=10.0)
    assert actual.shared.tolist() == [pytest.approx(268.8)]
    assert torch.equal(actual.shared, fit_shared(weight, grid, 16, 10.0))
    assert not torch.equal(actual.shared, quantize(weight, grid, 16).shared)
    assert (actual.dense() - weight).norm() < 0.15 * weight.norm()


def test_groups_that_no_scale_is_small_enough_for_are_counted():
    weight = random(3, 32)
    weight[1, 8:16] *= 1e-9
    weight[2, :8] = 0  # was zero before
    for name in ("int4", "nf4"):  # 8-bit floats still have some digits left there
        actual = quantize(weight, GRIDS[name], 8, dtype=torch.float16)
        assert actual.dense().isfinite().all()
        assert vanished(weight, actual) == 1
        assert vanished(weight, quantize(weight, GRIDS[name], 8)) == 0
        index = torch.arange(32).div(8, rounding_mode="floor").flip(0).to(torch.int32)
        turned = replace(actual, codes=actual.codes.flip(1), scale=actual.scale, group_index=index)
        assert vanished(weight.flip(1), turned) == 1


@pytest.mark.parametrize(
    ("width", "group_size", "groups"), [(8, 4, 2), (9, 4, 3), (3, 4, 1), (9, "channel", 1), (9, "tensor", 1)]
)
def test_groups_in_a_row(width, group_size, groups):
    assert groups_in(width, group_size) == groups


def test_a_short_last_group_is_filled_with_zeros():
    parts = grouped(torch.arange(1.0, 6)[None], 2)
    assert parts.tolist() == [[[1, 2], [3, 4], [5, 0]]]
    assert grouped(torch.ones(2, 3), "channel").shape == (2, 1, 3)
    assert grouped(torch.ones(2, 3), "tensor").shape == (1, 1, 6)


def test_spread_repeats_a_value_for_every_column_of_its_group():
    values = torch.tensor([[1.0, 2, 3]])
    assert spread(values, 5, 2).tolist() == [[1, 1, 2, 2, 3]]
    index = torch.tensor([2, 0, 0, 1, 2], dtype=torch.int32)
    assert spread(values, 5, 2, index).tolist() == [[3, 1, 1, 2, 3]]


def test_dense_by_hand_with_a_group_index():
    codes = torch.tensor([[1, -2, 3, 0]], dtype=torch.int8)
    actual = Codes(
        codes,
        scale=torch.tensor([[0.5, 2.0]]),
        zero=torch.tensor([[1.0, -1.0]]),
        grid=GRIDS["int4"],
        group_size=2,
        group_index=torch.tensor([0, 1, 0, 1], dtype=torch.int32),
    )
    assert actual.shape == (1, 4)
    assert actual.dense().tolist() == [[0.0, -2.0, 1.0, 2.0]]  # (1-1)/2, (-2+1)*2, (3-1)/2, (0+1)*2
    assert actual.dense(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("grid", GRIDS.values(), ids=lambda grid: grid.name)
def test_permuted_columns_with_their_index_are_the_same_weight(grid):
    actual = quantize(random(3, 12, seed=4), grid, 4)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    index = (torch.arange(12) // 4)[order].to(torch.int32)
    moved = replace(actual, codes=actual.codes[:, order], group_index=index)
    assert torch.equal(moved.dense(), actual.dense()[:, order])


def test_codes_of_tables_and_floats_are_unsigned():
    assert store(torch.tensor([200.0]), GRIDS["fp8_e4m3"]).dtype == torch.uint8
    assert store(torch.tensor([200.0]), GRIDS["fp8_e4m3"]).item() == 200
    assert store(torch.tensor([-8.0]), GRIDS["int4"]).item() == -8


def test_the_rounding_error_of_integers_is_at_most_half_a_step():
    weight = random(16, 64, seed=5)
    for symmetric in (True, False):
        actual = quantize(weight, GRIDS["int4"], 16, symmetric)
        step = spread(actual.scale, 64, 16)
        # the zero point is rounded too, which can push an end of the range out by up to half a step more
        assert ((actual.dense() - weight).abs() <= step * (0.5 if symmetric else 1) * (1 + 1e-5)).all()
        assert math.isclose(float((actual.dense() - weight).pow(2).mean() / step.pow(2).mean()), 1 / 12, rel_tol=0.15)


@pytest.mark.parametrize(
    ("group_size", "scales"), [(2, [[1.5, 3.0], [0.5, 2.0]]), ("channel", [[2.0], [1.0]]), ("tensor", [[1.5]])]
)
def test_absmean_is_the_mean_magnitude_by_hand(group_size, scales):
    """A short last group has its own mean; ternary: round(w / mean), clipped."""
    weight = torch.tensor([[1.0, -2.0, 3.0], [-1.0, 0.0, 2.0]])
    actual = quantize(weight, GRIDS["ternary"], group_size, search="absmean")
    assert actual.scale.tolist() == scales
    half = 0 if group_size == "channel" else 1  # 1 / 2 is a tie, which goes to 0
    assert (actual.dense() / spread(actual.scale, 3, group_size)).tolist() == [[half, -1, 1], [-1, 0, 1]]


@pytest.mark.parametrize("group_size", [2, "channel", "tensor"])
def test_the_mean_magnitude_is_that_of_the_kept_weights(group_size):
    weight = torch.tensor([[1.0, -2.0, 3.0, 5.0], [-1.0, 3.0, 2.0, 0.0]])
    mask = torch.tensor([[True, False, True, False], [True, False, False, True]])
    scales = {2: [[1.0, 3.0], [1.0, 0.0]], "channel": [[2.0], [0.5]], "tensor": [[1.25]]}[group_size]
    actual = quantize(weight, GRIDS["ternary"], group_size, search="absmean", mask=mask).scale
    assert actual.clamp(min=1e-6).tolist() == torch.tensor(scales).clamp(min=1e-6).tolist()
