"""Learned rounding: where it starts, what gradients it has, and what its codes are."""

import pytest
import torch

from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.learned import FACTORS, LIMIT, LearnedRounding


def weight_of(rows=6, width=40, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def begun(grid="int4", size=16, symmetric=True, mask=None, seed=0):
    weight = weight_of(seed=seed)
    return weight, LearnedRounding(weight, quantize(weight, GRIDS[grid], size, symmetric, mask=mask), mask)


@pytest.mark.parametrize(
    ("grid", "size", "symmetric"),
    [
        ("int4", 16, True),
        ("int3", 16, False),
        ("int4", "channel", True),
        ("int4", "tensor", True),
        ("nf4", 16, True),
        ("fp4_e2m1", 16, True),
        ("mxfp4", 32, True),
        ("nvfp4", 16, True),
    ],
)
def test_it_begins_as_the_codes_it_was_given(grid, size, symmetric):
    _, learned = begun(grid, size, symmetric)
    assert torch.equal(learned.weight().detach(), learned.start.dense())
    assert torch.equal(learned.codes(torch.float32).dense(), learned.start.dense())


def test_a_shift_of_half_a_step_turns_the_rounding_of_one_weight():
    weight = torch.tensor([[0.4, 7.5]])  # scale 1: 0.4 is rounded down
    learned = LearnedRounding(weight, quantize(weight, GRIDS["int4"]), None)
    assert learned.weight().tolist() == [[0.0, 7.0]]
    with torch.no_grad():
        learned.shift[0, 0, 0] = 0.2
    assert learned.weight().tolist() == [[1.0, 7.0]]
    assert learned.codes(torch.float32).codes.tolist() == [[1, 7]]


def test_gradients_pass_straight_through_and_clipped_weights_move_with_the_scale():
    weight = torch.tensor([[0.4, -2.2, 9.0]])
    start = quantize(torch.tensor([[0.4, -2.2, 7.5]]), GRIDS["int4"])  # scale 1; 9 is clipped to 7
    learned = LearnedRounding(weight, start, None)
    learned.weight().backward(torch.tensor([[1.0, 10.0, 100.0]]))
    assert learned.shift.grad.tolist() == [[[1.0, 10.0, 100.0]]]  # times the scale
    # d value / d scale = level - weight / scale where not clipped: (0 - 0.4), (-2 + 2.2), and the level 7 itself
    assert learned.factor.grad.item() == pytest.approx(-0.4 + 10 * 0.2 + 100 * 7)


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_pruned_stays_exactly_zero(symmetric):
    mask = weight_of(seed=3) > 0
    _, learned = begun("int4", 16, symmetric, mask)
    with torch.no_grad():
        learned.shift.uniform_(-LIMIT, LIMIT, generator=torch.Generator().manual_seed(1))
        learned.factor.fill_(0.9)
    assert (learned.weight()[~mask] == 0).all()
    assert (learned.codes(torch.float32).dense()[~mask] == 0).all()


def test_codes_are_of_scales_as_they_are_stored():
    _, learned = begun()
    with torch.no_grad():
        learned.factor.fill_(0.912345)
    codes = learned.codes(torch.bfloat16)
    assert torch.equal(codes.scale.to(torch.bfloat16).float(), codes.scale)


def test_bounds():
    _, learned = begun()
    with torch.no_grad():
        learned.shift.fill_(3)
        learned.factor.fill_(9)
    learned.limit()
    assert (learned.shift == LIMIT).all() and (learned.factor == FACTORS[1]).all()


def test_scales_that_are_not_plain_floats_stay():
    assert len(begun("mxfp4", 32)[1].parameters) == 1 and len(begun("int4")[1].parameters) == 2
