"""Principal components of a covariance that is known, and steps on orthogonal matrices by hand."""

import pytest
import torch

from compress.numerics.hadamard import random_orthogonal
from compress.numerics.rotation import cayley_step, nearest_orthogonal, principal_components


def test_known_components_come_back_in_order():
    draw = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(6, 6, generator=draw, dtype=torch.float64))
    sizes = torch.tensor([3.0, 0.0, 5.0, 1.0, 4.0, 2.0], dtype=torch.float64)
    rotation, energy = principal_components((basis * sizes) @ basis.T)
    assert torch.allclose(energy, sizes.sort(descending=True).values, atol=1e-12)
    assert torch.allclose(rotation.T @ rotation, torch.eye(6, dtype=torch.float64), atol=1e-12)
    expected = basis[:, sizes.argsort(descending=True)]
    assert torch.allclose((rotation * expected).sum(0).abs(), torch.ones(6, dtype=torch.float64), atol=1e-12)
    assert bool((rotation.gather(0, rotation.abs().argmax(0, keepdim=True)) > 0).all())


UP = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("rate", "cosine", "sine"),
    [
        (1.0, 15 / 17, 8 / 17),  # W = [[0, -1/2], [1/2, 0]], a = 1: tan(angle / 2) = a / 2 * 1/2
        (100.0, 0.6, 0.8),  # the limit of a is 1 / |W| = 2: tan(angle / 2) = 1/2
    ],
)
def test_one_step_by_hand(rate, cosine, sine):
    """The loss is the entry above the diagonal, so its gradient is 1 there; a rotation lowers it to -sine."""
    actual, momentum = cayley_step(torch.eye(2, dtype=torch.float64), UP, None, rate, 0.9)
    assert torch.allclose(actual, torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64))
    assert momentum.tolist() == [[0, -0.5], [0.5, 0]]


def test_momentum_by_hand():
    """M = 0.5 W - 0 after a step without a gradient: W has half its size, as it is tangent already."""
    unit, zero = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    _, momentum = cayley_step(unit, UP, None, 1.0, 0.5)
    actual, moved = cayley_step(unit, zero, momentum, 1.0, 0.5)
    tangent = 1 / 8  # a / 2 * 1/4
    assert float(actual[0, 0]) == pytest.approx((1 - tangent**2) / (1 + tangent**2))
    assert moved.tolist() == [[0, -0.25], [0.25, 0]]


def test_a_step_does_not_depend_on_the_start():
    """A step on R C with gradient G is R times the step on C with gradient R^T G, below the limit of the step."""
    first_result, second = random_orthogonal(6, 0), random_orthogonal(6, 1)
    gradient = 0.01 * torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    actual, moved = cayley_step(first_result @ second, gradient, None, 1.5, 0.0)
    alternative, pushed = cayley_step(second, first_result.T @ gradient, None, 1.5, 0.0)
    assert torch.allclose(actual, first_result @ alternative, atol=1e-12) and torch.allclose(
        moved, first_result @ pushed, atol=1e-12
    )


def test_the_nearest_orthogonal_matrix_is_the_polar_factor():
    near = random_orthogonal(8, 0) + 1e-3 * random_orthogonal(8, 1)
    residual, _, right = torch.linalg.svd(near)
    actual = nearest_orthogonal(near.float())
    assert actual.dtype == torch.float64 and torch.allclose(actual, residual @ right, atol=1e-6)
    assert float((actual.T @ actual - torch.eye(8)).abs().max()) < 1e-12
