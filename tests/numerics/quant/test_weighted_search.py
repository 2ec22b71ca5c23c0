"""The scale search 'importance': exact where an exact answer exists, and never worse than others in its own error."""

import pytest
import torch
from draws import random
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.numerics.quant import weighted_search
from compress.numerics.quant.codes import fit, fit_shared, quantize, spread
from compress.numerics.quant.grids import GRIDS, IntGrid
from compress.numerics.quant.weighted_search import importance_of

quick = settings(max_examples=8)


def dense(weight, name, size, importance, search="importance"):
    """The weight rounded to the nearest levels of the scales that a search finds."""
    grid, width = GRIDS[name], weight.shape[1]
    inputs = {"importance": importance} if search == "importance" else {}
    shared = fit_shared(weight, grid, size, None, search, **inputs)
    scale, zero = fit(weight, grid, size, not grid.offset, search, shared=shared, **inputs)
    step, shift = spread(scale, width, size), None if zero is None else spread(zero, width, size)
    return grid.decode(grid.encode(weight, step, shift), step, shift)


@pytest.mark.parametrize("name", ["int4", "int4_signed", "uint4", "nf4", "int5_signed", "uint5"])
@quick
@given(seed=st.integers(0, 10**6), steps=st.floats(0.01, 100))
def test_a_weight_on_the_grid_is_found_exactly(name, seed, steps):
    grid = GRIDS[name]
    levels = grid.decode(
        torch.arange(2.0**grid.bits) + (grid.lowest if isinstance(grid, IntGrid) else 0), 1 + torch.zeros(1), None
    )
    picked = levels[torch.randint(len(levels), (4, 64), generator=torch.Generator().manual_seed(seed))]
    picked[:, ::32], picked[:, 1::32] = levels[0], levels[-1]
    weight = picked * steps - (3.7 * steps if grid.offset else 0)
    assert (
        dense(weight, name, 32, random(64, seed=seed).abs() + 0.1) - weight
    ).abs().max() <= 2e-5 * weight.abs().max()


@pytest.mark.parametrize(
    "name", [name for name, grid in GRIDS.items() if not (grid.averaged or grid.scaling.whole_groups)]
)
@quick
@given(seed=st.integers(0, 10**6))
def test_the_weighted_error_is_less_than_with_other_searches(name, seed):
    weight, importance = random(16, 256, seed=seed) ** 3, random(256, seed=seed + 1).exp()
    size = GRIDS[name].group_size or 32
    error = {
        search: float(((dense(weight, name, size, importance, search) - weight).square() * importance).sum())
        for search in ("absmax", "mse", "importance")
    }
    assert error["importance"] <= error["absmax"] * (1 + 1e-5)
    assert error["importance"] <= error["mse"] * (1.02 if GRIDS[name].bits < 8 else 1.1)


def test_columns_without_importance_do_not_move_the_scale():
    weight = torch.tensor([[1.0, 2.0, -8.0, 3.0, 10.0]])
    for last_result, expected in ((0.0, 7.0), (1e6, 10.0)):
        importance = torch.tensor([1.0, 1.0, 1.0, 1.0, last_result])
        assert dense(weight, "int4", "channel", importance)[0, 4].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["int4_signed", "uint4_k", "int6_k", "iq4_xs"])
def test_the_search_in_small_chunks_finds_the_same(monkeypatch, name):
    weight, importance = random(9, 256) ** 3, random(256, seed=1).exp()
    expected = dense(weight, name, GRIDS[name].group_size or 32, importance)
    monkeypatch.setattr(weighted_search, "CHUNK", 700)
    assert torch.equal(dense(weight, name, GRIDS[name].group_size or 32, importance), expected)


def test_a_short_last_group_and_groups_of_zeros():
    weight = random(3, 40)
    weight[1] = 0
    for name in ("int4_signed", "uint4"):
        actual = dense(weight, name, 32, torch.ones(40))
        assert (actual[1] == 0).all() and (actual - weight)[:, 32:].abs().max() < 0.2 and actual.isfinite().all()
        assert torch.equal(actual[:, 32:], dense(weight[:, 32:], name, "channel", torch.ones(8)))


def test_the_importance_is_that_of_the_sweep_in_the_original_order():
    factor = torch.tensor([[0.5, 9.0], [0.0, 1.0]])
    assert importance_of(factor, None).tolist() == pytest.approx([1.6, 0.4])
    assert importance_of(factor, torch.tensor([1, 0])).tolist() == pytest.approx([0.4, 1.6])


def test_equal_importance_is_the_plain_squared_error():
    weight = random(8, 64)
    errors = [
        float((actual - weight).square().sum())
        for actual in (
            dense(weight, "int3", 32, torch.ones(64)),
            quantize(weight, GRIDS["int3"], 32, search="mse").dense(),
        )
    ]
    assert errors[0] < errors[1]
