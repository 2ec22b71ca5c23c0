"""The Triton programs for columns compute what plain torch computes: on a GPU, or in Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from column_cases import GROUPS, check_gptq, check_layouts, check_nan, check_search, expected, problem, same
from draws import random
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.native import columns as native
from compress.native import gpu_columns, gpus
from compress.native.choice import VARIABLE
from compress.native.columns import RoundedColumns, ScaledGrid
from compress.native.library import library

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed; it is in the extra gpu, for Linux"
    ),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # numpy's, in the interpreter
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INT4 = ScaledGrid((-8, 7), torch.ones(1))
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


def here(*shape, seed=0):
    return random(*shape, seed=seed).to(DEVICE)


@settings(max_examples=8)
@given(ROWS, COUNTS, BITS, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99))
def test_a_sweep_is_that_of_plain_torch(rows, columns, bits, shared, zeros, masked, asked, seed):
    state, matrix, grid, keep = problem(rows, columns, shared, zeros, masked, seed, bits, DEVICE)
    original = state.clone()
    actual = native.sweep(state, matrix, grid, keep, with_targets=asked)
    same(actual, expected(state, matrix, grid, keep))
    assert torch.equal(state, original) and (actual.targets is None) != asked


@settings(max_examples=8)
@given(ROWS, COUNTS, BITS, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99))
def test_a_descent_is_that_of_plain_torch(rows, columns, bits, shared, zeros, masked, seed):
    state, matrix, grid, keep = problem(rows, columns, shared, zeros, masked, seed, bits, DEVICE)
    old, pivots = here(columns, rows, seed=seed + 6), 1 + here(columns, seed=seed + 7).abs()
    actual = native.descend(state, old, matrix, pivots, grid, keep)
    same(actual, expected(state, matrix, grid, keep, old, pivots))
    assert actual.targets is None


@pytest.mark.few(1)
@pytest.mark.parametrize("tile", [(16, 1, 16, 16), (64, 2, 32, 16), (32, 1, 16, 128)])
def test_other_tiles_and_all_columns_of_a_call(tile, monkeypatch):
    monkeypatch.setattr(gpu_columns, "TILE", gpu_columns.ColumnTile(*tile))
    state, matrix, grid, keep = problem(70, native.MAX_COLUMNS, False, True, True, 1, device=DEVICE)
    same(native.sweep(state, matrix, grid, keep, with_targets=True), expected(state, matrix, grid, keep))


@settings(max_examples=10)
@given(
    st.sampled_from([1, 3, 33]),
    st.integers(1, 4),
    st.sampled_from([1, 7, 16, 24, 128, 256, 300, 1000]),
    BITS,
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_sums_of_groups(rows, groups, size, bits, zeros, summed, seed):
    weight, importance = here(rows, groups, size, seed=seed), here(groups, size, seed=seed + 1).abs()
    scale = (0.1 + here(rows, groups, seed=seed + 2).abs()) * (1 if seed % 2 else -1)
    zero = here(rows, groups, seed=seed + 3).mul(2).round() if zeros else None
    shift = 0 if zero is None else zero[..., None]
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    level = (weight / scale[..., None] + shift).round().clamp(lowest, highest) - shift
    expected = [(level * scale[..., None] - weight).square(), level.square(), level * weight][: 3 if summed else 1]
    turned = weight.transpose(0, 2).contiguous().transpose(0, 2)
    actual = native.group_sums(turned, importance, ScaledGrid((lowest, highest), scale, zero), summed)
    assert len(actual) == len(expected)
    for mine, alternative in zip(actual, expected, strict=True):
        assert torch.allclose(mine, (importance * alternative).sum(-1), rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(library() is None or DEVICE.type != "cpu", reason="the interpreter and C++ on the same tensors")
def test_the_programs_and_the_library_agree(monkeypatch):
    state, matrix, grid, keep = problem(40, 130, False, True, True, 3, device=DEVICE)
    old, pivots, weight = here(130, 40, seed=6), 1 + here(130, seed=7).abs(), here(20, 3, 40, seed=8)
    groups = ScaledGrid((-8, 7), 0.2 + here(20, 3).abs())

    def compute():
        swept = native.sweep(state, matrix, grid, keep, with_targets=True)
        return (
            swept,
            native.descend(state, old, matrix, pivots, grid, keep),
            native.group_sums(weight, weight[0].abs(), groups, True),
        )

    *mine, sums = compute()
    monkeypatch.setattr(gpu_columns, "DEVICE", "cuda")
    *alternatives, expected = compute()
    for actual, alternative in zip(mine, alternatives, strict=True):
        same(actual, [alternative.codes, alternative.values, alternative.moves, alternative.targets])
    for actual, alternative in zip(sums, expected, strict=True):
        torch.testing.assert_close(actual, alternative, rtol=1e-5, atol=1e-4)


def test_ties_go_to_the_even_code_and_a_scale_of_zero_to_the_ends():
    state = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 7.5, 100.0, -100.0, torch.inf, 1.0, -1.0, 0.0]], device=DEVICE)
    scale = torch.tensor([1.0] * 9 + [0.0] * 3, device=DEVICE)
    actual = native.sweep(state, torch.zeros(1, 1, device=DEVICE), ScaledGrid((-8, 7), scale))
    assert actual.codes[0, :11].tolist() == [0, 2, 2, 0, -2, 7, 7, -8, 7, 7, -8] and bool(actual.codes[0, 11].isnan())
    assert actual.values[0, 9:11].tolist() == [0, 0]


def test_moves_are_what_is_left_of_the_rounded_value():
    """No product is contracted with the difference: a number of the grid has no error."""
    scale = 0.1 + here(64, seed=1).abs()
    state = (here(20, 64, seed=2) * 4).round().clamp(-8, 7) * scale
    actual = native.sweep(state, here(20, 20, seed=3), ScaledGrid((-8, 7), scale))
    assert torch.equal(actual.values, state) and not bool(actual.moves.any())


def test_nan_stays_in_its_row():
    check_nan(DEVICE)


def test_tensors_that_are_not_contiguous_and_none_at_all():
    check_layouts(DEVICE)
    empty = native.group_sums(here(0, 3, 4), here(3, 4), ScaledGrid((-8, 7), here(0, 3)), True)
    assert [item.shape for item in empty] == [(0, 3)] * 3


@pytest.mark.few(1, slow=2)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("group", "order", "regroup"), GROUPS)
def test_gptq_and_its_refinement_are_those_of_plain_torch(plain, symmetric, group, order, regroup):
    check_gptq(plain, symmetric, group, order, regroup, symmetric, DEVICE)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_search_for_scales_is_that_of_plain_torch(plain, symmetric):
    check_search(plain, symmetric, DEVICE)


def test_what_the_programs_take(monkeypatch):
    assert (
        native.usable(here(1), INT4)
        and not native.usable(here(1).double(), INT4)
        and not native.usable(here(1).requires_grad_(), INT4)
    )
    assert not native.usable(torch.zeros(1, device="meta"), INT4)
    assert isinstance(native.sweep(here(2, 3), here(2, 2), ScaledGrid((-8, 7), here(3).abs())), RoundedColumns)
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
    "capability,cases",
    [(89, CASES[2:]), *(pytest.param(item, CASES, marks=pytest.mark.exhaustive) for item in (80, 89, 90))],
)
def test_the_programs_compile_for_gpus(capability, cases, tmp_path):
    """Triton compiles them to machine code without a GPU; hardly any register is spilled."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), settings.get("PYTHONPATH", "")])
    settings["TRITON_CACHE_DIR"] = str(tmp_path)
    completed = subprocess.run(
        [sys.executable, Path(__file__).parents[1] / "kernels/compile_columns.py", str(capability)],
        input="\n".join(map(json.dumps, cases)),
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    actual = [json.loads(line) for line in completed.stdout.splitlines()]
    assert len(actual) == len(cases)
    assert all(item["shared"] <= 48 << 10 and item["spilled"] <= 256 for item in actual), actual
