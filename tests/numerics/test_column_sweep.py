"""The column sweep: the textbook recursion of optimal brain surgery, exact optima, and no trace of how it is cut up."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.numerics import column_sweep as obs
from compress.numerics.linalg import inverse_factor


class Levels:
    """Round to whole multiples of a step, found anew for every group from the columns as they stand then."""

    def __init__(self, group, step=None):
        self.group, self.fixed = group, step
        self.opened = []

    def starts(self, width):
        return range(0, width, self.group)

    def open(self, column, remaining):
        self.opened.append(column)
        self.step = (
            self.fixed or remaining[: self.group].abs().amax(0) / 3.6
        )  # not 3.5, which would put the largest of them on a tie

    def compress(self, column, values):
        return (values / self.step).round().clamp(-4, 3) * self.step


class Drop:
    """Prune the columns of a set."""

    def __init__(self, columns):
        self.columns = columns

    def starts(self, width):
        return [0]

    def open(self, column, remaining):
        pass

    def compress(self, column, values):
        return torch.zeros_like(values) if column in self.columns else values


def problem(rows, width, seed, tokens=None, correlation=0.9):
    """(weight, Hessian) in float64, the inputs correlated with each other."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    inputs = torch.randn(tokens or 4 * width, width, generator=generator, dtype=torch.float64)
    inputs += correlation * 3 * torch.randn(inputs.shape[0], 1, generator=generator, dtype=torch.float64)
    hessian = 2 * inputs.T @ inputs / inputs.shape[0]
    return weight, hessian + 0.01 * hessian.diagonal().mean() * torch.eye(width, dtype=torch.float64)


def factor_of(hessian):
    return torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)


def output_error(weight, actual, hessian):
    """||(W - Q) X||^2 up to a constant."""
    difference = (weight - actual).to(hessian.dtype)
    return float(((difference @ hessian) * difference).sum())


def textbook(weight, hessian, rule):
    """Optimal brain surgery without any batching (GPTQ, equations 2 and 3): the inverse of the Hessian of what is left
    is written down for every column, and all columns that are left make up for the error at once.
    """
    work, inverse = weight.clone(), torch.linalg.inv(hessian)
    width = weight.shape[1]
    for i in range(width):
        if i in rule.starts(width):
            rule.open(i, work[:, i:].T)
        new = rule.compress(i, work[:, i])
        # delta_F = -(w_i - quant(w_i)) / [H_F^-1]_ii * (H_F^-1)_:,i
        step = -(work[:, i] - new)[:, None] / inverse[i, i] * inverse[i]
        work[:, i + 1 :] += step[:, i + 1 :]
        work[:, i] = new
        # H_-i^-1 = H^-1 - H^-1_:,i H^-1_i,: / [H^-1]_ii, without row and column i
        inverse = inverse - inverse[:, [i]] @ inverse[[i], :] / inverse[i, i]
        inverse[i, :] = inverse[:, i] = 0
    return work


@pytest.mark.parametrize(
    ("width", "group"),
    [(1, 1), (2, 1), (15, 4), (16, 16), (17, 5), (33, 8), (100, 7), (130, 130), (131, 20), (200, 64), (257, 129)],
)
def test_the_sweep_is_the_textbook_recursion(width, group):
    weight, hessian = problem(6, width, seed=width)
    actual = obs.sweep(weight, factor_of(hessian), Levels(group))
    expected = textbook(weight, hessian, Levels(group))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=25)
@given(width=st.integers(1, 40), rows=st.integers(1, 5), group=st.integers(1, 45), seed=st.integers(0, 10**6))
def test_any_small_problem_is_the_textbook_recursion(width, rows, group, seed):
    weight, hessian = problem(rows, width, seed)
    actual = obs.sweep(weight, factor_of(hessian), Levels(group))
    torch.testing.assert_close(actual, textbook(weight, hessian, Levels(group)), rtol=1e-8, atol=1e-8)


def test_pruned_columns_are_made_up_for_exactly():
    # Removing the first columns leaves a least-squares problem in the others, whose optimum is known in closed form.
    weight, hessian = problem(4, 30, seed=5)
    actual = obs.sweep(weight, factor_of(hessian), Drop(set(range(10))))
    remaining = torch.linalg.solve(hessian[10:, 10:], hessian[10:, :10] @ weight[:, :10].T).T
    assert (actual[:, :10] == 0).all()
    torch.testing.assert_close(actual[:, 10:], weight[:, 10:] + remaining, rtol=1e-9, atol=1e-9)


def test_with_two_columns_the_second_is_the_exact_optimum_given_the_first():
    codes = torch.arange(-4, 4).double()
    for seed in range(20):
        weight, hessian = problem(1, 2, seed)
        step = float(weight.abs().max()) / 3.5
        actual = obs.sweep(weight, factor_of(hessian), Levels(2, step))
        pairs = torch.tensor(list(itertools.product(codes, codes))) * step
        errors = torch.tensor([output_error(weight, pair[None], hessian) for pair in pairs])
        same_first = pairs[:, 0] == actual[0, 0]
        assert same_first.sum() == 8
        best = pairs[same_first][errors[same_first].argmin()]
        torch.testing.assert_close(actual[0], best, rtol=1e-12, atol=1e-12)


def test_the_last_column_is_always_the_exact_optimum_given_the_others():
    weight, hessian = problem(8, 21, seed=3)
    step = 0.5
    actual = obs.sweep(weight, factor_of(hessian), Levels(21, step))
    for row in range(8):
        errors = []
        for code in range(-4, 4):
            tried = actual[row : row + 1].clone()
            tried[0, -1] = code * step
            errors.append(output_error(weight[row : row + 1], tried, hessian))
        assert actual[row, -1] == (min(range(8), key=errors.__getitem__) - 4) * step


def test_on_correlated_inputs_it_beats_rounding_to_nearest():
    ratios = []
    for seed in range(40):
        weight, hessian = problem(16, 24, seed)
        swept = obs.sweep(weight, factor_of(hessian), Levels(24))
        rounded = obs.sweep(weight, torch.eye(24, dtype=torch.float64), Levels(24))
        ratios.append(output_error(weight, swept, hessian) / output_error(weight, rounded, hessian))
    assert max(ratios) < 1
    assert sorted(ratios)[20] < 0.5


def test_uncorrelated_inputs_need_no_making_up():
    weight, _ = problem(5, 40, seed=0)
    hessian = torch.diag(torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1)
    rule = Levels(40)
    actual = obs.sweep(weight, factor_of(hessian), rule)
    rule.open(0, weight.T)
    nearest = torch.stack([rule.compress(i, weight[:, i]) for i in range(40)], dim=1)
    assert torch.equal(actual, nearest)


def test_a_rule_that_changes_nothing_gives_back_the_weight():
    weight, hessian = problem(5, 150, seed=2)
    copy = weight.clone()
    assert torch.equal(obs.sweep(weight, factor_of(hessian), Drop(set())), weight)
    obs.sweep(weight, factor_of(hessian), Levels(16))
    assert torch.equal(weight, copy)  # and the input is left alone


@pytest.mark.parametrize("part", [1, 3, 16, 128, 1000])
@pytest.mark.parametrize("leaf", [1, 2, 16, 200])
def test_how_columns_are_cut_into_parts_and_leaves_leaves_no_trace(monkeypatch, part, leaf):
    weight, hessian = problem(3, 53, seed=7)
    expected = textbook(weight, hessian, Levels(10))
    monkeypatch.setattr(obs, "PART", part)
    monkeypatch.setattr(obs, "LEAF", leaf)
    torch.testing.assert_close(obs.sweep(weight, factor_of(hessian), Levels(10)), expected, rtol=1e-9, atol=1e-9)


def test_in_float32_parts_and_leaves_change_the_result_by_rounding_only(monkeypatch):
    # Pruning has no rounding boundary that could turn a small difference into a large one.
    weight, hessian = (t.float() for t in problem(8, 300, seed=9))
    factor, _ = inverse_factor(hessian, 0.01)
    rule = Drop(set(range(0, 300, 3)))
    full = obs.sweep(weight, factor, rule)
    monkeypatch.setattr(obs, "PART", 7)
    monkeypatch.setattr(obs, "LEAF", 3)
    torch.testing.assert_close(obs.sweep(weight, factor, rule), full, rtol=1e-3, atol=1e-4)


def test_groups_are_opened_once_each_in_order_on_columns_already_made_up_for():
    weight, hessian = problem(2, 150, seed=4)
    observed = {}

    class Watching(Levels):
        def open(self, column, remaining):
            observed[column] = remaining.clone()
            super().open(column, remaining)

    rule = Watching(37)
    obs.sweep(weight, factor_of(hessian), rule)
    assert rule.opened == [0, 37, 74, 111, 148]
    for column, remaining in observed.items():
        assert remaining.shape == (150 - column, 2)
        partial = Levels(37)
        partial.compress = lambda i, v, c=column, r=partial: Levels.compress(r, i, v) if i < c else v
        residual = obs.sweep(weight, factor_of(hessian), partial)
        torch.testing.assert_close(remaining.T, residual[:, column:], rtol=1e-9, atol=1e-9)
