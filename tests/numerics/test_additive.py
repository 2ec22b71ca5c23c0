"""Sums of codebook entries: each step by hand or against a known best, and none raises the error."""

import pytest
import torch
from draws import correlated, random

from compress.numerics.additive import Books, alternate, nearest, start, vector_kmeans
from compress.numerics.linalg import damped, inverse_factor


def hessian_of(width=16, tokens=400):
    rows = correlated(tokens, width)
    return damped(2 / tokens * rows.T @ rows, 0.01)


def drawn(rows=12, width=16, length=4, entries=8, count=1, seed=0, hessian=None):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, entries, (count, rows, width // length), generator=generator)
    books = random(count, entries, length, seed=seed)
    hessian = hessian_of(width) if hessian is None else hessian
    return Books(random(rows, width, seed=seed + 1), hessian, random(rows, seed=seed + 2).abs() + 0.5, books, codes)


def test_looked_up_and_its_adjoint_by_hand():
    codes, books = torch.tensor([[[1, 0]]]), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    state = Books(torch.zeros(1, 4), torch.eye(4), torch.tensor([10.0]), books, codes)
    assert state.reconstructed(books).tolist() == [[30.0, 40.0, 10.0, 20.0]]
    assert state.entry_sums(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[[30.0, 40.0], [10.0, 20.0]]]
    assert state.error() == pytest.approx(30**2 + 40**2 + 10**2 + 20**2)


@pytest.mark.parametrize("count", [1, 2])
def test_the_adjoint_is_that_of_the_linear_map(count):
    state = drawn(count=count)
    books, values = random(*state.books.shape, seed=7), random(12, 16, seed=8)
    residual = (state.reconstructed(books) * values).sum()
    torch.testing.assert_close((books * state.entry_sums(values)).sum(), residual)


def test_books_are_the_least_squares_solution():
    state = drawn()
    root = torch.linalg.cholesky(state.hessian.double())
    columns = []
    for unit in torch.eye(state.books.numel()):
        columns.append((state.reconstructed(unit.view_as(state.books)).double() @ root).flatten())
    expected = torch.linalg.lstsq(torch.stack(columns, 1), (state.weight.double() @ root).flatten()[:, None]).solution
    state.fit_books(60)
    torch.testing.assert_close(state.books.flatten().double(), expected[:, 0], rtol=2e-3, atol=2e-3)


def test_a_scale_is_the_least_squares_solution_of_its_row():
    state = drawn(rows=2)
    plain = state.reconstructed(state.books) / state.scale[:, None]
    state.weight = plain * torch.tensor([[3.0], [-2.0]])
    original = state.scale.clone()
    state.fit_scales()
    torch.testing.assert_close(state.scale, torch.stack([torch.tensor(3.0), original[1]]))  # below 0: it stays


def test_with_uncorrelated_inputs_codes_are_the_nearest():
    state = drawn(hessian=torch.eye(16))
    state.fit_codes(0)
    runs = (state.weight / state.scale[:, None]).reshape(-1, 4)
    assert torch.equal(state.codes[0].flatten(), nearest(runs, state.books[0]))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_step_raises_the_error(count):
    state = drawn(rows=40, count=count, entries=16)
    last_result = state.error()
    for _ in range(3):
        for step in (
            lambda: state.fit_books(6),
            state.fit_scales,
            *[lambda b=b: state.fit_codes(b) for b in range(count)],
        ):
            step()
            assert state.error() <= last_result * (1 + 1e-5)
            last_result = state.error()


def test_the_sweep_compensates_and_turns_improve_it():
    weight, hessian = random(48, 32), hessian_of(32)
    factor, _ = inverse_factor(hessian, 0.0001)
    state = start(weight, hessian, factor, 16, 4, 1, seed=0)
    rounded = Books(weight, hessian, state.scale, state.books, state.codes.clone())
    rounded.codes[0] = nearest((weight / state.scale[:, None]).reshape(-1, 4), state.books[0]).view(48, 8)
    assert state.error() < 0.9 * rounded.error()
    errors = alternate(state, 6, 6)
    assert len(errors) == 7 and errors == sorted(errors, reverse=True) and errors[-1] < 0.9 * errors[0]


@pytest.mark.parametrize("count", [1, 2])
def test_a_weight_that_is_made_of_entries_is_found_almost_exactly(count):
    created = drawn(rows=64, width=32, entries=4, count=count, hessian=hessian_of(32))
    weight = created.reconstructed(created.books)
    factor, _ = inverse_factor(created.hessian, 0.0001)
    best = min(alternate(start(weight, created.hessian, factor, 4, 4, count, seed), 20, 10)[-1] for seed in range(6))
    assert best < (1e-3 if count == 1 else 0.05) * float(((weight @ created.hessian) * weight).sum())


def test_fewer_points_than_entries_and_equal_points():
    few = vector_kmeans(random(3, 2), torch.ones(3), 8, torch.Generator())
    assert few.shape == (8, 2) and bool(few.isfinite().all())
    equal = vector_kmeans(torch.ones(20, 2), torch.zeros(20), 4, torch.Generator())
    torch.testing.assert_close(equal[nearest(torch.ones(1, 2), equal)], torch.ones(1, 2))
