"""Fake quantization: LSQ's gradients by hand and by differences, and the gradient that passes straight through."""

import pytest
import torch

from compress.numerics.quant.fake import learned_step, levels, straight
from compress.numerics.quant.grids import GRIDS


def one_group(values, scale, grid, zero=None):
    """(rounded, gradients of values, scale and zero) for an upstream gradient of 1, 2, 3, ..."""
    values = torch.tensor([[values]], requires_grad=True)
    scale = torch.tensor([[[scale]]], requires_grad=True)
    zero = None if zero is None else torch.tensor([[[float(zero)]]], requires_grad=True)
    actual = learned_step(values, scale, zero, GRIDS[grid])
    actual.backward(torch.arange(1, values.shape[-1] + 1).float()[None, None])
    shift = None if zero is None else zero.grad.item()
    return actual.flatten().tolist(), values.grad.flatten().tolist(), scale.grad.item(), shift


def test_the_gradients_of_learned_steps_by_hand():
    """int3 (-4 .. 3), s = 0.5: v / s = 0.6, -1.2, 3.4 (above the range), -10 (below)."""
    rounded, to_values, to_scale, _ = one_group([0.3, -0.6, 1.7, -5.0], 0.5, "int3")
    assert rounded == [0.5, -0.5, 1.5, -2.0]
    assert to_values == [1, 2, 0, 0]
    assert to_scale == pytest.approx(1 * (1 - 0.6) + 2 * (-1 + 1.2) + 3 * 3 + 4 * -4, rel=1e-5)


def test_the_gradients_with_a_zero_point_by_hand():
    """int2 (-2 .. 1), s = 0.5, z = -1: v / s + z = -0.4, 0.2, 3 (above), -3 (below)."""
    rounded, to_values, to_scale, to_zero = one_group([0.3, 0.6, 2.0, -1.0], 0.5, "int2", -1)
    assert rounded == [0.5, 0.5, 1.0, -0.5]
    assert to_values == [1, 2, 0, 0]
    assert to_scale == pytest.approx(1 * (1 - 0.6) + 2 * (1 - 1.2) + 3 * 2 + 4 * -1, rel=1e-5)
    assert to_zero == pytest.approx(-0.5 * (3 + 4))


@pytest.mark.parametrize("name", ["ternary", "binary", "nf4", "fp4_e2m1", "fp8_e4m3", "int4"])
def test_where_it_is_smooth_the_gradient_of_the_step_is_that_of_differences(name):
    """Beyond the range the value is a level times the step: there nothing is estimated."""
    grid, scale = GRIDS[name], 0.25
    values = [3 * scale * levels(grid)[1], 3 * scale * levels(grid)[0]]
    _, to_values, to_scale, _ = one_group(values, scale, name)
    up, down = (one_group(values, scale + e, name)[0] for e in (0.01, -0.01))
    by_differences = sum(weight * (a - b) / 0.02 for weight, a, b in zip((1, 2), up, down, strict=True))
    assert to_scale == pytest.approx(by_differences, rel=1e-3) and to_values == [0, 0]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("int2", (-2, 1)),
        ("int8", (-128, 127)),
        ("ternary", (-1, 1)),
        ("binary", (-1, 1)),
        ("fp4_e2m1", (-6, 6)),
        ("fp8_e4m3", (-448, 448)),
    ],
)
def test_the_ends_of_grids(name, ends):
    assert levels(GRIDS[name]) == ends


def test_straight_through_is_exact_forward_and_the_identity_backward():
    values = torch.tensor([0.1, -7.3, 1e-8], requires_grad=True)
    rounded = torch.tensor([0.3, -7.0, 0.7])
    actual = straight(values, rounded)
    actual.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(actual, rounded) and values.grad.tolist() == [1, 2, 3]
