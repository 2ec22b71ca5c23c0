"""Shrinkage, and the inverse factor: plain linear algebra, and a damping raised in the open or an error in words."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import NumericError
from compress.numerics import linalg
from compress.numerics.linalg import (
    ESCALATION,
    RETRIES,
    SMALL,
    inverse_factor,
    inverse_of_upper,
    shrink_,
    solve_positive,
)


def positive_definite(size, seed, condition=100.0):
    """A random symmetric matrix with eigenvalues between 1 and `condition`."""
    generator = torch.Generator().manual_seed(seed)
    vectors, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    values = torch.logspace(0, torch.log10(torch.tensor(condition)).item(), size, dtype=torch.float64)
    return ((vectors * values) @ vectors.T).float()


@settings(max_examples=40)
@given(size=st.integers(1, 40), seed=st.integers(0, 10**6), damping=st.sampled_from([1e-4, 0.01, 0.1, 1.0]))
def test_the_factor_is_that_of_the_inverse_of_the_damped_matrix(size, seed, damping):
    hessian = positive_definite(size, seed)
    factor, used = inverse_factor(hessian, damping)
    assert used == damping
    assert torch.equal(factor, factor.triu())
    assert (factor.diagonal() > 0).all()
    exact = hessian.double()
    exact = torch.linalg.inv(exact + damping * exact.diagonal().mean() * torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(factor.T @ factor, exact.float(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(factor, torch.linalg.cholesky(exact, upper=True).float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [SMALL + 1, 3 * SMALL])
def test_a_wide_triangle_is_inverted_by_halves(size):
    hessian = positive_definite(size, 1)
    triangle = torch.linalg.cholesky(hessian.double(), upper=True)
    inverse = inverse_of_upper(triangle)
    assert torch.equal(inverse, inverse.triu())
    torch.testing.assert_close(inverse @ triangle, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-9)
    factor, _ = inverse_factor(hessian, 0.01)
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(
        factor.double().T @ factor.double() @ damped, torch.eye(size).double(), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("strip", [1, 96, 10**6])
def test_a_triangle_is_inverted_in_strips_of_any_width(strip, monkeypatch):
    monkeypatch.setattr(linalg, "STRIP", strip)
    size = 4 * SMALL + 3
    triangle = torch.linalg.cholesky(positive_definite(size, 1).double(), upper=True)
    inverse = inverse_of_upper(triangle)
    assert torch.equal(inverse, inverse.triu())
    torch.testing.assert_close(inverse @ triangle, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-9)


def test_a_diagonal_matrix_by_hand():
    factor, _ = inverse_factor(torch.diag(torch.tensor([3.0, 15.0])), damping=1 / 9)
    # mean diagonal 9, so 1 is added: inv = diag(1/4, 1/16), U = diag(1/2, 1/4)
    torch.testing.assert_close(factor, torch.diag(torch.tensor([0.5, 0.25])))


def test_shrinkage_by_hand():
    hessian = torch.tensor([[4.0, 2.0, 0.0], [2.0, 9.0, -3.0], [0.0, -3.0, 2.0]])
    assert torch.equal(shrink_(hessian.clone(), 0), hessian)
    actual = shrink_(hessian, 0.5)
    assert actual is hessian and actual.tolist() == [[4.0, 1.0, 0.0], [1.0, 9.0, -1.5], [0.0, -1.5, 2.0]]


@settings(max_examples=30)
@given(size=st.integers(1, 20), seed=st.integers(0, 10**6), shrinkage=st.floats(0, 0.99))
def test_shrinkage_keeps_variances_and_never_conditions_worse(size, seed, shrinkage):
    hessian = positive_definite(size, seed)
    scale = hessian.diagonal().rsqrt()
    correlations = shrink_(hessian.clone(), shrinkage) * scale * scale[:, None]
    assert torch.equal(shrink_(hessian.clone(), shrinkage).diagonal(), hessian.diagonal())
    # every eigenvalue of the correlations moves towards their mean, 1, by the shrinkage
    original = torch.linalg.eigvalsh((hessian * scale * scale[:, None]).double())
    actual = torch.linalg.eigvalsh(correlations.double())
    torch.testing.assert_close(actual, (1 - shrinkage) * original + shrinkage, rtol=0, atol=1e-4)


def test_the_input_is_left_alone():
    hessian = positive_definite(5, 0)
    copy = hessian.clone()
    inverse_factor(hessian, 0.1)
    assert torch.equal(hessian, copy)


def test_the_damping_is_raised_for_a_matrix_that_is_not_positive_definite():
    # eigenvalues 1 and -0.001, mean diagonal 0.4995: the first damping of 10^-4 * 10^k above 0.001 / 0.4995 is 10^-2
    vectors = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5
    hessian = (vectors * torch.tensor([1.0, -0.001])) @ vectors.T
    factor, used = inverse_factor(hessian, damping=1e-4)
    assert used == pytest.approx(1e-2)
    damped = hessian + 1e-2 * hessian.diagonal().mean() * torch.eye(2)
    torch.testing.assert_close(factor.T @ factor, torch.linalg.inv(damped), rtol=1e-3, atol=1e-3)


def test_a_singular_matrix_gets_a_larger_damping():
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    factor, used = inverse_factor(rows.T @ rows, damping=1e-9)  # rank 3 of 8; 1e-9 is lost in float32
    assert used > 1e-9
    assert any(used == pytest.approx(1e-9 * ESCALATION**k) for k in range(1, RETRIES + 1))
    assert factor.isfinite().all()


def test_float64_is_tried_before_the_damping_is_raised():
    # float32 cannot tell this matrix from the singular [[1, 1], [1, 1]]
    hessian = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 1e-8]], dtype=torch.float64)
    assert int(torch.linalg.cholesky_ex(hessian.float())[1]) != 0
    factor, used = inverse_factor(hessian, damping=1e-12)
    assert used == 1e-12
    assert factor.dtype == torch.float32
    # inv = 1e8 [[1, -1], [-1, 1]] up to 1 part in 1000, so U = 1e4 [[1, -1], [0, (1e-8)^(1/2)]]
    torch.testing.assert_close(factor, torch.tensor([[1e4, -1e4], [0, 1.0]]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_hessian_that_is_not_finite_raises(bad):
    hessian = torch.eye(3)
    hessian[1, 2] = bad
    with pytest.raises(NumericError, match="holds NaN or infinity"):
        inverse_factor(hessian, 0.01)


@pytest.mark.parametrize("hessian", [-torch.eye(3), torch.zeros(3, 3)], ids=["negative", "zero"])
def test_what_no_damping_can_help_raises_and_says_how_far_it_went(hessian):
    with pytest.raises(NumericError, match=r"not positive definite even with a damping of 100$"):
        inverse_factor(hessian, 0.01)


def test_a_matrix_without_a_solution_is_told_from_the_others():
    matrices = torch.stack([torch.eye(3), torch.ones(3, 3), -torch.eye(3), positive_definite(3, 1)])
    found, solved = solve_positive(matrices, torch.ones(4, 3, 1))
    assert solved.tolist() == [True, False, False, True]
    torch.testing.assert_close(matrices[3] @ found[3], torch.ones(3, 1))
    assert found[0].tolist() == [[1.0]] * 3
