"""Learned clipping: ranges and gradients by hand, the clip of the least error, and codes that are what was learned."""

import math

import pytest
import torch
from draws import random

from compress.numerics.quant.clipping import INITIAL, LearnedClipping
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.rounding import GridOptions

KEPT = 1 / (1 + math.exp(-INITIAL))


def clipping(weight, grid="int4", size=8, symmetric=True, search="absmax", mask=None, signed=False):
    return LearnedClipping(
        weight, GridOptions(GRIDS[grid], size, symmetric, search, torch.float32, signed=signed), mask
    )


def test_scales_and_zero_points_by_hand():
    weight = torch.tensor([[-1.0, 0.25, 3.0, 0.0]])
    codes = clipping(weight, "int4", 4, symmetric=False).codes(weight)
    # h = (sigma(gamma) max W - sigma(beta) min W) / (2^N - 1), z = -round(sigma(beta) min W / h), codes from -8
    scale = KEPT * 4.0 / 15
    assert codes.scale.item() == pytest.approx(scale)
    zero = -round(KEPT * -1.0 / scale) - 8
    assert codes.zero.item() == zero
    expected = [min(max(round(value / scale) + zero, -8), 7) for value in (-1.0, 0.25, 3.0, 0.0)]
    assert codes.codes.tolist() == [expected]


def test_without_zero_points_the_longer_end_counts():
    weight = torch.tensor([[-1.0, 0.25, 3.0, 0.0]])
    assert clipping(weight, "int4", 4).codes(weight).scale.item() == pytest.approx(KEPT * 3.0 / 7.5)


def test_gradients_by_hand():
    """With the codes fixed, a value inside is scale * (code - v / scale) away from v, a clipped one scale * code."""
    weight = torch.tensor([[0.4, -2.2, 8.0]])  # scale 0.982 * 8 / 7.5: 8 is clipped to 7 steps
    learned = clipping(weight, "int4", 3)
    scale = KEPT * 8 / 7.5
    assert learned.weight(weight).tolist()[0] == pytest.approx([0.0, -2 * scale, 7 * scale])
    learned.weight(weight).backward(torch.tensor([[1.0, 10.0, 100.0]]))
    to_scale = (0 - 0.4 / scale) + 10 * (-2 + 2.2 / scale) + 100 * 7
    assert learned.upper.grad.item() == pytest.approx(to_scale * 8 / 7.5 * KEPT * (1 - KEPT), rel=1e-5)
    assert learned.lower.grad.item() == 0  # the shorter end


def test_gradients_reach_a_scale_of_the_columns():
    """W s with s learned: the gradient passes straight through, and through the range that the largest weight sets."""
    weight, factor = torch.tensor([[0.4, -2.2, 7.0]]), torch.ones(3, requires_grad=True)
    clipping(weight, "int4", 3).weight(weight * factor).backward(torch.tensor([[1.0, 0.0, 0.0]]))
    scale = KEPT * 7 / 7.5
    assert factor.grad[0].item() == pytest.approx(0.4)
    assert factor.grad[2].item() == pytest.approx((0 - 0.4 / scale) * scale, rel=1e-5)  # d scale / d s_3 = scale


@pytest.mark.parametrize("symmetric", [True, False])
def test_descent_finds_the_clip_of_the_least_error(symmetric):
    weight = random(1, 64, seed=3)
    weight[0, 5] = 5.0  # an outlier: covering it leaves few levels for the others
    learned = clipping(weight, "int2", 64, symmetric)

    def error(upper, lower):
        with torch.no_grad():
            learned.upper.fill_(upper)
            learned.lower.fill_(lower)
        return float((learned.codes(weight).dense() - weight).square().sum())

    ends = [math.log(remaining / (1 - remaining)) for remaining in torch.linspace(0.2, 0.98, 40).tolist()]
    best = min(error(upper, lower) for upper in ends for lower in (ends if not symmetric else [upper]))
    start = error(INITIAL, INITIAL)
    optimizer, actual = torch.optim.AdamW(learned.parameters, lr=0.03, weight_decay=0.0), start
    for _ in range(300):
        optimizer.zero_grad()
        loss = (learned.weight(weight) - weight).square().sum()
        loss.backward()
        actual = min(actual, loss.item())
        optimizer.step()
    assert best < 0.7 * start
    assert actual < 1.03 * best


@pytest.mark.parametrize(
    ("grid", "symmetric", "signed"),
    [
        ("int3", True, False),
        ("int3", True, True),
        ("int3", False, False),
        ("nf4", True, False),
        ("ternary", True, False),
    ],
)
def test_a_search_is_where_it_starts(grid, symmetric, signed):
    weight = random(6, 32, seed=1) ** 3  # long tails, which the search cuts
    search = "absmean" if grid == "ternary" else "mse"
    actual = clipping(weight, grid, 16, symmetric, search, signed=signed).codes(weight)
    expected = quantize(weight, GRIDS[grid], 16, symmetric, search, signed=signed)
    error, least = (float((codes.dense() - weight).square().sum()) for codes in (actual, expected))
    assert error < 1.03 * least  # ranges of more than 0.99 are the difference
    equal = (actual.scale - expected.scale).abs() < 1e-5 * expected.scale.abs()
    assert equal.float().mean() > 0.3


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_what_was_learned_and_pruned_weights_stay_zero(symmetric):
    weight, mask = random(6, 40, seed=2), random(6, 40, seed=3) > 0
    learned = clipping(weight, "int4", 16, symmetric, mask=mask)  # the last group is short
    with torch.no_grad():
        learned.upper.copy_(random(6, 3, seed=4))
        learned.lower.copy_(random(6, 3, seed=5))
    codes = learned.codes(weight)
    assert torch.equal(codes.dense(), learned.weight(weight).detach())
    assert (codes.dense()[~mask] == 0).all() and codes.dense()[mask].count_nonzero() > 0.5 * mask.sum()


def test_rows_may_be_scaled_after_learning():
    """Q(W / s) = Q(W) / s for a factor of each row: folding a scale into a writer changes none of its codes."""
    weight, factor = random(6, 32, seed=6), 2.0 ** torch.tensor([[-2.0], [0.0], [1.0], [3.0], [-1.0], [2.0]])
    learned = clipping(weight, "int3", 16, symmetric=False)
    first_result, second = learned.codes(weight), learned.codes(weight * factor)
    assert torch.equal(first_result.codes, second.codes) and torch.equal(first_result.scale * factor, second.scale)
