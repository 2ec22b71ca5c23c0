"""Hadamard matrices of many orders: orthogonal, known by hand where they are small, and equal to the fast transform."""

import math

import pytest
import torch

from compress.numerics.hadamard import (
    exists,
    factors,
    fits,
    hadamard,
    is_prime_power,
    jacobsthal,
    largest_block,
    neighbours,
    random_orthogonal,
    randomized,
    signs_of,
    transformed,
)

WIDTHS = [1, 2, 4, 8, 12, 20, 24, 28, 36, 44, 52, 64, 76, 100, 108, 140, 148, 344, 576, 640, 768, 896, 1536]


@pytest.mark.parametrize("order", WIDTHS)
def test_rows_are_orthogonal(order):
    actual = hadamard(order).int()
    assert bool((actual.abs() == 1).all())
    assert torch.equal((actual.double() @ actual.double().T), order * torch.eye(order, dtype=torch.float64))


def test_orders_of_files_are_not_factored_unless_they_divide_the_width():
    """The search would take hours for an order near 2^62."""
    before = factors.cache_info()
    for order in (2**22, 12 * 1_000_003, 2**23 - 4):
        assert not fits(order, 4096)
    assert factors.cache_info() == before
    assert fits(64, 4096) and not fits(11, 4092)


def test_small_ones_by_hand():
    """Sylvester's of order 4; the squares of the field of 7 are 1, 2, 4, so chi is known."""
    signs = torch.tensor([[1, 1], [1, -1]])
    assert torch.equal(hadamard(4).long(), torch.kron(signs, signs))
    assert jacobsthal(7)[:, 0].tolist() == [0, 1, 1, -1, 1, -1, -1]
    assert jacobsthal(5)[:, 0].tolist() == [0, 1, -1, -1, 1]


@pytest.mark.parametrize("q", [9, 25, 27, 49])
def test_prime_powers_are_fields(q):
    """Half of the elements that are not 0 are squares, and Q Q^T = q I - J (Paley, lemma 2)."""
    actual = jacobsthal(q).double()
    assert torch.equal(actual @ actual.T, q * torch.eye(q, dtype=torch.float64) - 1)
    assert torch.equal(actual.T, actual if q % 4 == 1 else -actual)
    assert is_prime_power(q) and not is_prime_power(q * 2) and not is_prime_power(1)


def test_orders_are_factorized_with_the_least_work():
    assert factors(576) == (12, 12, 2, 2) and factors(1536) == (12, *[2] * 7)
    assert factors(11008) == (344, *[2] * 5) and factors(8) == (2, 2, 2)
    assert factors(6) is None and factors(9) is None and factors(92) is None  # 92 is Williamson's, not Paley's
    assert not exists(0) and not exists(-4) and neighbours(92) == (88, 96)


def test_what_has_no_matrix_says_which_orders_have_one():
    with pytest.raises(ValueError, match="of order 92 is known here; the next orders are 88 and 96"):
        hadamard(92)
    with pytest.raises(ValueError, match="of order 30 is known here; the next orders are 28 and 32"):
        transformed(torch.ones(2, 30), 30)


def test_the_largest_block_of_a_width():
    assert [largest_block(n) for n in (48, 30, 7, 92, 1000, 576)] == [48, 2, 1, 4, 1000, 576]


@pytest.mark.parametrize("order", [1, 2, 36, 64, 128, 576, 1536])
def test_the_fast_transform_is_the_product(order):
    draw = torch.Generator().manual_seed(order)
    x = torch.randn(3, 2, 2 * order, generator=draw, dtype=torch.float64)
    dense = hadamard(order).double() / math.sqrt(order)
    for inverse, matrix in ((False, dense), (True, dense.T)):
        expected = (x.unflatten(-1, (2, order)) @ matrix).flatten(-2)
        assert torch.allclose(transformed(x, order, inverse), expected, atol=1e-12)
    assert torch.allclose(transformed(transformed(x, order), order, inverse=True), x, atol=1e-12)
    assert transformed(x.bfloat16(), order).dtype == torch.bfloat16


def test_an_outlier_is_spread_evenly():
    x = torch.zeros(1, 576)
    x[0, 5] = 24.0
    assert torch.allclose(transformed(x, 576).abs(), torch.ones(1, 576), atol=1e-5)


@pytest.mark.parametrize("width", [36, 30])
def test_random_rotations_are_orthogonal_and_follow_their_seed(width):
    actual = randomized(width, 3)
    assert torch.allclose(actual @ actual.T, torch.eye(width, dtype=torch.float64), atol=1e-12)
    assert torch.equal(actual, randomized(width, 3)) and not torch.equal(actual, randomized(width, 4))
    assert torch.equal(randomized(30, 1), random_orthogonal(30, 1))
    assert set(signs_of(64, 0).tolist()) == {1, -1} and abs(int(signs_of(4096, 0).sum())) < 300


def test_matrices_that_inference_made_serve_training():
    with torch.inference_mode():
        transformed(torch.ones(1, 148), 148)
    x = torch.randn(3, 148, requires_grad=True)
    transformed(x, 148).square().sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 2 * x.detach(), atol=1e-4)


def test_matrices_are_built_on_the_processor_whatever_the_default_device_is():
    with torch.device("meta"):
        assert hadamard(108).device.type == "cpu"
