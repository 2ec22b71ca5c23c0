"""Repair against least squares solved another way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.numerics.repair import repaired


@settings(deadline=None, max_examples=30)
@given(
    width=st.integers(2, 12),
    left=st.integers(1, 11),
    damping=st.sampled_from([1e-4, 0.01, 1.0]),
    seed=st.integers(0, 99),
)
def test_it_is_the_ridge_regression(width, left, damping, seed):
    """The rows X_K and, below them, sqrt(ridge) I are to give X W^T and sqrt(ridge) W_K^T."""
    draw = torch.Generator().manual_seed(seed)
    rows, weight = (torch.randn(n, width, generator=draw, dtype=torch.float64) for n in (40, 3))
    kept = torch.randperm(width, generator=draw)[: min(left, width - 1)]
    gram = rows.T @ rows
    ridge = damping * gram[kept][:, kept].diagonal().mean()
    eye = ridge.sqrt() * torch.eye(len(kept), dtype=torch.float64)
    wanted = torch.linalg.lstsq(torch.cat([rows[:, kept], eye]), torch.cat([rows @ weight.T, eye @ weight[:, kept].T]))
    found, used = repaired(weight.float(), gram.float(), kept, damping)
    assert used == damping
    assert torch.allclose(found.double(), wanted.solution.T, atol=2e-3)


def test_what_is_orthogonal_stays_and_what_is_copied_is_added():
    rows = torch.tensor([[1.0, 0, 1], [0, 2, 0], [1, 0, 1]])
    weight = torch.tensor([[3.0, 5, 7]])
    found, _ = repaired(weight, rows.T @ rows, torch.tensor([0, 1]), 1e-9)
    assert torch.allclose(found, torch.tensor([[10.0, 5]]), atol=1e-4)


def test_where_nothing_came_by_the_weight_stays():
    weight = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    found, used = repaired(weight, torch.zeros(3, 3), torch.tensor([2, 0]), 0.01)
    assert torch.equal(found, weight[:, [2, 0]]) and used == pytest.approx(0.01)
