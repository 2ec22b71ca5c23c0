"""The Triton programs for columns compute what plain torch computes: on a GPU, or in Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draws import random
from hypothesis import given, settings
from hypothesis import strategies as st
from test_columns import expected, hessian_of, same

from compress.native import columns as native
from compress.native import gpu_columns, gpus
from compress.native.choice import VARIABLE
from compress.native.columns import Integers, Rounded
from compress.native.library import library
from compress.numerics.linalg import inverse_factor
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.refine import refined
from compress.numerics.quant.rounding import GridOptions, round_columns
from compress.numerics.quant.weighted_search import WeightedSearch

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed; it is in the extra gpu, for Linux"
    ),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # numpy's, in the interpreter
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNTS = st.sampled_from([1, 2, 15, 16, 17, 31, 33, 64, 100, 128])
ROWS = st.sampled_from([1, 5, 31, 32, 33, 70])
BITS = st.integers(2, 8)


@pytest.fixture(autouse=True, scope="module")
def on_this_device():
    """Calls on this machine's device are computed by these programs."""
    library()  # the choice of the CPU's kernels stays
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)  # "none" would switch these off, too
        patch.setattr(gpu_columns, "DEVICE", DEVICE.type)
        gpus.installed.cache_clear()
        yield
    gpus.installed.cache_clear()


@pytest.fixture
def plain(monkeypatch):
    """plain(compute): its result in plain torch."""

    def computed(compute):
        with monkeypatch.context() as without:
            without.setattr(native, "usable", lambda tensor: False)
            return compute()

    return computed


def here(*shape, seed=0):
    return random(*shape, seed=seed).to(DEVICE)


def problem(rows, columns, bits, shared, zeros, masked, seed):
    """The arguments of a sweep; scales of both signs."""
    shape = (rows,) if shared else (columns, rows)
    scale = (0.1 + here(*shape, seed=seed).abs()) * here(*shape, seed=seed + 1).sign()
    zero = here(*shape, seed=seed + 2).mul(2).round() if zeros else None
    grid = Integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, scale, zero)
    keep = here(columns, rows, seed=seed + 3) > -0.5 if masked else None
    matrix = here(columns, columns, seed=seed + 5) / columns**0.5
    return here(columns, rows, seed=seed + 4), 0.5 * matrix, grid, keep


@settings(max_examples=25)
@given(ROWS, COUNTS, BITS, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99))
def test_a_sweep_is_that_of_plain_torch(rows, columns, bits, shared, zeros, masked, asked, seed):
    state, matrix, grid, keep = problem(rows, columns, bits, shared, zeros, masked, seed)
    before = state.clone()
    found = native.sweep(state, matrix, grid, keep, wanted=asked)
    same(found, expected(state, matrix, grid, keep))
    assert torch.equal(state, before) and (found.wanted is None) != asked


@settings(max_examples=25)
@given(ROWS, COUNTS, BITS, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99))
def test_a_descent_is_that_of_plain_torch(rows, columns, bits, shared, zeros, masked, seed):
    state, matrix, grid, keep = problem(rows, columns, bits, shared, zeros, masked, seed)
    old, pivots = here(columns, rows, seed=seed + 6), 1 + here(columns, seed=seed + 7).abs()
    found = native.descend(state, old, matrix, pivots, grid, keep)
    same(found, expected(state, matrix, grid, keep, old, pivots))
    assert found.wanted is None


@pytest.mark.parametrize("tile", [(16, 1, 16, 16), (64, 2, 32, 16), (32, 1, 16, 128)])
def test_other_tiles_and_all_columns_of_a_call(tile, monkeypatch):
    monkeypatch.setattr(gpu_columns, "TILE", gpu_columns.Tile(*tile))
    state, matrix, grid, keep = problem(70, native.MOST, 4, False, True, True, 1)
    same(native.sweep(state, matrix, grid, keep, wanted=True), expected(state, matrix, grid, keep))


@settings(max_examples=30)
@given(
    st.sampled_from([1, 3, 33]), st.integers(1, 4), st.sampled_from([1, 7, 16, 24, 128, 256, 300, 1000]), BITS, st.booleans(),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_sums_of_groups(rows, groups, size, bits, zeros, summed, seed):
    weight, importance = here(rows, groups, size, seed=seed), here(groups, size, seed=seed + 1).abs()
    scale = (0.1 + here(rows, groups, seed=seed + 2).abs()) * (1 if seed % 2 else -1)
    zero = here(rows, groups, seed=seed + 3).mul(2).round() if zeros else None
    shift = 0 if zero is None else zero[..., None]
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    level = (weight / scale[..., None] + shift).round().clamp(lowest, highest) - shift
    wanted = [(level * scale[..., None] - weight).square(), level.square(), level * weight][: 3 if summed else 1]
    turned = weight.transpose(0, 2).contiguous().transpose(0, 2)
    found = native.group_sums(turned, importance, Integers(lowest, highest, scale, zero), summed)
    assert len(found) == len(wanted)
    for mine, other in zip(found, wanted, strict=True):
        assert torch.allclose(mine, (importance * other).sum(-1), rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(library() is None or DEVICE.type != "cpu", reason="the interpreter and C++ on the same tensors")
def test_the_programs_and_the_library_agree(monkeypatch):
    state, matrix, grid, keep = problem(40, 130, 4, False, True, True, 3)
    old, pivots, weight = here(130, 40, seed=6), 1 + here(130, seed=7).abs(), here(20, 3, 40, seed=8)
    groups = Integers(-8, 7, 0.2 + here(20, 3).abs())

    def compute():
        swept = native.sweep(state, matrix, grid, keep, wanted=True)
        return (
            swept,
            native.descend(state, old, matrix, pivots, grid, keep),
            native.group_sums(weight, weight[0].abs(), groups, True),
        )

    *mine, sums = compute()
    monkeypatch.setattr(gpu_columns, "DEVICE", "cuda")
    *others, wanted = compute()
    for found, other in zip(mine, others, strict=True):
        same(found, [other.codes, other.values, other.moves, other.wanted])
    for found, other in zip(sums, wanted, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-4)


def test_ties_go_to_the_even_code_and_a_scale_of_zero_to_the_ends():
    state = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 7.5, 100.0, -100.0, torch.inf, 1.0, -1.0, 0.0]], device=DEVICE)
    scale = torch.tensor([1.0] * 9 + [0.0] * 3, device=DEVICE)
    found = native.sweep(state, torch.zeros(1, 1, device=DEVICE), Integers(-8, 7, scale))
    assert found.codes[0, :11].tolist() == [0, 2, 2, 0, -2, 7, 7, -8, 7, 7, -8] and bool(found.codes[0, 11].isnan())
    assert found.values[0, 9:11].tolist() == [0, 0]


def test_moves_are_what_is_left_of_the_rounded_value():
    """No product is contracted with the difference: a number of the grid has no error."""
    scale = 0.1 + here(64, seed=1).abs()
    state = (here(20, 64, seed=2) * 4).round().clamp(-8, 7) * scale
    found = native.sweep(state, here(20, 20, seed=3), Integers(-8, 7, scale))
    assert torch.equal(found.values, state) and not bool(found.moves.any())


def test_nan_stays_in_its_row():
    state, matrix, grid, keep = problem(40, 40, 4, True, False, False, 1)
    state[2, 4] = torch.nan
    found = native.sweep(state, matrix, grid, keep)
    assert found.codes[2:, 4].isnan().all() and found.values[2:, 4].isnan().all()
    others = [row for row in range(40) if row != 4]
    assert not found.values[:, others].isnan().any() and not found.values[:2].isnan().any()


def test_tensors_that_are_not_contiguous_and_none_at_all():
    state, matrix, grid, keep = problem(20, 6, 4, False, True, True, 2)
    wanted = native.sweep(state, matrix, grid, keep)
    turned = replace(grid, scale=grid.scale.T.contiguous().T, zero=grid.zero.T.contiguous().T)
    wide = torch.cat([matrix, matrix], dim=1)
    for given_matrix in (matrix.T.contiguous().T, wide[:, :6]):
        found = native.sweep(state.T.contiguous().T, given_matrix, turned, keep.T.contiguous().T)
        assert torch.equal(found.codes, wanted.codes) and torch.equal(found.moves, wanted.moves)
    ones = torch.ones(20, device=DEVICE)
    assert native.sweep(state[:, :0], matrix, Integers(-8, 7, ones[:0])).codes.shape == (6, 0)
    assert native.sweep(state[:0], matrix[:0, :0], Integers(-8, 7, ones)).codes.shape == (0, 20)
    none = native.group_sums(here(0, 3, 4), here(3, 4), Integers(-8, 7, here(0, 3)), True)
    assert [each.shape for each in none] == [(0, 3)] * 3


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("group", "order", "regroup"), [(16, True, False), (24, True, True), (16, False, False), ("channel", True, False)])  # fmt: skip
def test_gptq_and_its_refinement_are_those_of_plain_torch(plain, symmetric, group, order, regroup):
    weight, hessian = here(37, 136, seed=1), hessian_of(136).to(DEVICE)
    columns = hessian.diagonal().argsort(descending=True) if order else None
    ordered = hessian if columns is None else hessian[columns][:, columns]
    factor, _ = inverse_factor(ordered, 0.01)
    mask = here(37, 136, seed=2) > -0.7 if symmetric else None
    options = GridOptions(GRIDS["int4"], group, symmetric, "absmax", torch.float32)

    def compute():
        rule = round_columns(weight, factor, options, mask, columns, regroup, keep_wanted=True)
        kept = weight if mask is None else weight * mask
        return rule, refined(kept, rule.codes, hessian, 1, torch.float32, mask, columns, signed=symmetric)

    (mine, better), (other, wanted) = compute(), plain(compute)
    rows = (mine.codes.codes == other.codes.codes).all(1) & (better.codes == wanted.codes).all(1)
    assert rows.float().mean() > 0.8
    assert torch.allclose(mine.wanted[rows], other.wanted[rows], rtol=1e-3, atol=1e-3)
    assert torch.allclose(better.dense()[rows], wanted.dense()[rows], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_search_for_scales_is_that_of_plain_torch(plain, symmetric):
    parts, importance = here(40, 3, 24), here(3, 24, seed=1).abs()

    def search():
        return WeightedSearch(parts, importance, GRIDS["int4"], symmetric, torch.float32, None, signed=True).best()

    (scale, zero), (wanted, wanted_zero) = search(), plain(search)
    agree = torch.isclose(scale, wanted, rtol=1e-5)
    assert agree.float().mean() > 0.95 and (zero is None) == symmetric
    assert zero is None or torch.equal(zero[agree], wanted_zero[agree])


def test_what_the_programs_take(monkeypatch):
    assert (
        native.usable(here(1)) and not native.usable(here(1).double()) and not native.usable(here(1).requires_grad_())
    )
    assert not native.usable(torch.zeros(1, device="meta"))
    assert isinstance(native.sweep(here(2, 3), here(2, 2), Integers(-8, 7, here(3).abs())), Rounded)
    monkeypatch.setattr(gpu_columns, "capability", lambda device: (7, 5))
    assert not gpu_columns.usable(here(1))


@pytest.mark.parametrize("reason", ["switched off", "not installed"])
def test_without_triton(reason, monkeypatch):
    gpus.installed.cache_clear()
    if reason == "switched off":
        monkeypatch.setenv(VARIABLE, "none")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    try:
        assert not gpu_columns.usable(here(1))
    finally:
        monkeypatch.undo()
        gpus.installed.cache_clear()


CASES = [
    {"columns": 128, "zeros": False, "masked": False, "descent": False},
    {"columns": 128, "zeros": True, "masked": True, "descent": True},
    {"size": 128, "zeros": True},
]


@pytest.mark.parametrize(
    "capability,cases", [(89, CASES[2:]), *(pytest.param(each, CASES, marks=pytest.mark.slow) for each in (80, 89, 90))]
)
def test_the_programs_compile_for_gpus(capability, cases, tmp_path):
    """Triton compiles them to machine code without a GPU; hardly any register is spilled."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), settings.get("PYTHONPATH", "")])
    settings["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[1] / "kernels/compile_columns.py", str(capability)],
        input="\n".join(map(json.dumps, cases)), env=settings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases)
    assert all(each["shared"] <= 48 << 10 and each["spilled"] <= 256 for each in found), found
