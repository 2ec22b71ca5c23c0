"""Codebooks of runs: the search against all combinations of entries and signs, and rounding by hand."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import ModelError
from compress.numerics.quant import codebooks
from compress.numerics.quant.codebooks import UNIT, Codebook, RunSearch
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS

quants = pytest.importorskip("gguf.quants")

RUNS = [grid for grid in GRIDS.values() if grid.run > 1]
NAMES = [grid.name for grid in RUNS]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def every_run(book: Codebook, odd: bool | None) -> torch.Tensor:
    """The signed values of every entry with every allowed combination of signs."""
    signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=book.length)))
    if odd is not None:
        signs = signs[(signs < 0).sum(1) % 2 == int(odd)]
    points = torch.tensor(book.magnitudes)[book.entries()]
    return (points[None] * signs[:, None]).flatten(0, 1)


def is_in_the_codebook(grid, codes) -> bool:
    half = len(grid.levels) // 2
    codes = codes.long()
    negative = codes < half
    index = torch.where(negative, half - 1 - codes, codes - half)
    whole = bool(grid.codebook.holds(index.unflatten(-1, (-1, grid.codebook.length))).all())
    return whole and not (grid.codebook.even and bool((negative.unflatten(-1, (-1, UNIT)).sum(-1) % 2).any()))


@pytest.mark.parametrize("grid", RUNS, ids=NAMES)
def test_levels_and_entries_are_those_of_the_owner(grid):
    kind = getattr(quants, grid.codebook.type_name)
    factor = kind.grid_map[0]  # the smallest level is 1
    assert [level * factor for level in grid.levels[len(grid.levels) // 2 :]] == list(kind.grid_map)
    assert grid.codebook.entries().shape == kind.grid_shape
    assert len(grid.codebook.entries().unique(dim=0)) == kind.grid_shape[0]


@pytest.mark.parametrize("grid", RUNS, ids=NAMES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 16), scale=st.floats(0.2, 8), columns=st.sampled_from([8, 64]))
def test_rounded_runs_are_entries_and_come_back(grid, seed, scale, columns):
    codes = grid.encode(random(3, columns, seed=seed) * scale, torch.tensor(1.0), None)
    assert is_in_the_codebook(grid, codes)
    assert torch.equal(grid.encode(grid.decode(codes, torch.tensor(0.25), None), torch.tensor(0.25), None), codes)


@pytest.mark.parametrize("grid", RUNS, ids=NAMES)
def test_a_short_last_run_counts_as_padded_with_zeros(grid):
    weight, one = random(4, 12), torch.tensor(1.0)
    padded = torch.nn.functional.pad(weight, (0, 4))
    assert torch.equal(grid.encode(weight, one, None), grid.encode(padded, one, None)[:, :12])


def test_an_odd_number_of_minus_signs_loses_the_cheapest():
    """All weights round to level 1, an entry of iq3_xxs; 0.9 of the eight has the least magnitude."""
    grid = GRIDS["iq3_xxs"]
    weight = torch.tensor([1.1, -1.2, 1.0, 1.3, 1.2, 0.9, 1.0, 1.1])
    assert bool((grid.codebook.entries() == 0).all(1).any())
    assert grid.decode(grid.encode(weight, torch.tensor(1.0), None), torch.tensor(1.0), None).tolist() == [
        *(1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 1.0, 1.0),
    ]
    free = GRIDS["iq3_s"]
    assert free.decode(free.encode(weight, torch.tensor(1.0), None), torch.tensor(1.0), None).tolist() == [
        *(1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    ]


@pytest.mark.parametrize("name", ["iq3_s", "iq2_xxs"])
def test_with_a_diagonal_matrix_the_search_finds_the_best_of_all_runs(name):
    """Errors of different weights count apart: a sign costs what the search says, so every run is the best one."""
    grid = GRIDS[name]
    book, matrix = grid.codebook, torch.diag(torch.tensor([1.0, 3.0, 0.5, 2.0, 1.5, 1.0, 0.7, 4.0]))
    targets = random(24, UNIT, seed=1) * 4
    found = RunSearch(book, matrix).nearest(targets)
    best = torch.zeros(len(targets))
    for start in range(0, UNIT, book.length):
        part, diagonal = targets[:, start : start + book.length], matrix.diagonal()[start : start + book.length]
        runs = every_run(book, False if book.even else None)
        costs = (
            (part.square() * diagonal).sum(1, keepdim=True) + runs.square() @ diagonal - 2 * (part * diagonal) @ runs.T
        )
        best += costs.amin(1)
    torch.testing.assert_close(found.cost, best, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("grid", RUNS, ids=NAMES)
def test_the_search_is_near_the_best_of_all_runs_for_any_matrix(grid):
    """All pairs of runs cannot be listed: the first run is compared for the error that the best second one leaves."""
    book, noise = grid.codebook, random(UNIT, 24, seed=2)
    matrix, targets = noise @ noise.T / 24, random(16, UNIT, seed=3) * grid.levels[-1] / 3
    found = RunSearch(book, matrix).nearest(targets)
    error = targets - found.values
    torch.testing.assert_close(((error @ matrix) * error).sum(1), found.cost, rtol=1e-3, atol=1e-3)
    assert is_in_the_codebook(grid, found.codes)
    assert torch.equal(torch.tensor(grid.levels)[found.codes], found.values)
    plain = targets - grid.decode(grid.encode(targets, torch.tensor(1.0), None), torch.tensor(1.0), None)
    assert float(found.cost.sum()) < 0.9 * float(((plain @ matrix) * plain).sum())
    if book.length == UNIT and len(book.entries()) == 256:
        runs = every_run(book, False)
        costs = ((targets @ matrix) * targets).sum(1, keepdim=True)
        best = (costs + ((runs @ matrix) * runs).sum(1) - 2 * (targets @ matrix) @ runs.T).amin(1)
        assert (found.cost >= best - 1e-3).all() and float(found.cost.sum()) <= 1.03 * float(best.sum())


@pytest.mark.parametrize("name", ["iq3_s", "iq3_xxs"])
def test_two_runs_of_a_unit_are_near_the_best_pair(name):
    """Brute force over all second runs, for every first one of the 64 nearest."""
    book, noise = GRIDS[name].codebook, random(UNIT, 24, seed=4)
    matrix, targets = noise @ noise.T / 24, random(6, UNIT, seed=5) * 5
    found = RunSearch(book, matrix).nearest(targets)
    for target, cost in zip(targets, found.cost, strict=True):
        best = torch.inf
        for odd in (False, True) if book.even else (None,):
            runs = every_run(book, odd)
            first = runs[(runs - target[:4]).square().sum(1).topk(64, largest=False).indices]
            carried = (target[:4] - first) @ matrix[:4, 4:]
            # e1 M11 e1 + 2 e1 M12 e2 + e2 M22 e2
            seconds = target[4:] - runs
            own = ((seconds @ matrix[4:, 4:]) * seconds).sum(1)
            firsts = (((target[:4] - first) @ matrix[:4, :4]) * (target[:4] - first)).sum(1)
            best = min(best, float((firsts[:, None] + 2 * carried @ seconds.T + own).min()))
        assert float(cost) <= 1.5 * best + 1e-3


def test_quantized_scales_are_odd_multiples_of_a_float16_step():
    codes = quantize(random(4, 512, seed=6), GRIDS["iq3_s"], 32, search="mse")
    steps = codes.shared.view(4, 2).repeat_interleave(8, 1)
    integers = (codes.scale / steps).round()
    assert torch.equal(integers * steps, codes.scale) and bool((integers % 2 == 1).all())
    assert integers.min() >= 1 and integers.max() <= 31 and torch.equal(codes.shared.half().float(), codes.shared)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    import builtins

    original = builtins.__import__

    def without_gguf(name, *args):
        if name == "gguf":
            raise ImportError(name)
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(ModelError, match=r"codebook of IQ1_S is read from the package gguf, .* compress-llm\[gguf\]"):
        codebooks.Codebook("IQ1_S", 8, (1.0,), False).entries()
    grid = GRIDS["iq3_s"]
    assert grid.decode(torch.tensor([0, 15]), torch.tensor(2.0), None).tolist() == [-30.0, 30.0]
