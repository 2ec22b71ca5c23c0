"""Weights in training through fake quantization: what is multiplied by is what is stored, steps learn, masks hold."""

import pytest
import torch

from compress.layers.parts.codes import CodesPart
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.rounding import GridOptions
from compress.train.fake_quantized import FakeQuantized, LearnedSteps


def weight_of(rows=4, width=40, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def how(name, group_size=16, symmetric=True, search="absmax", dtype=torch.bfloat16):
    return GridOptions(GRIDS[name], group_size, symmetric, search, dtype)


def moved(made):
    """Somewhere on the way of training."""
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return made


CASES = [
    ("int3", 16, True),
    ("int2", 16, False),
    ("int4", "channel", False),
    ("int8", "tensor", True),
    ("nf4", 16, True),
    ("ternary", 16, True),
    ("binary", "tensor", True),
    ("fp8_e4m3", "channel", True),
    ("mxfp4", 32, True),
]


@pytest.mark.parametrize(("name", "group_size", "symmetric"), CASES)
def test_what_is_stored_is_what_was_multiplied_by(name, group_size, symmetric):
    """To the last bit, after packing, with scales in bfloat16 and a short last group."""
    weight, rounding = weight_of(), how(name, group_size, symmetric)
    made = [FakeQuantized(rounding, None)]
    if rounding.grid.scaling.free:
        made.append(moved(LearnedSteps(rounding, None, weight)))
    for parametrization in made:
        used = parametrization(weight)
        codes, _ = parametrization.finalize(weight, torch.bfloat16)
        packed = CodesPart.of(codes).in_storage(torch.bfloat16)
        assert torch.equal(packed.codes().dense(torch.float32), used)


@pytest.mark.parametrize(("name", "group_size", "symmetric"), [one for one in CASES if not GRIDS[one[0]].centered])
def test_before_any_step_it_is_rounding_to_nearest(name, group_size, symmetric):
    weight, rounding = weight_of(), how(name, group_size, symmetric)
    wanted = quantize(weight, rounding.grid, group_size, symmetric, dtype=torch.bfloat16).dense()
    assert torch.equal(FakeQuantized(rounding, None)(weight), wanted)
    if rounding.grid.scaling.free:
        assert torch.equal(LearnedSteps(rounding, None, weight)(weight), wanted)


def test_the_gradient_of_a_found_scale_passes_straight_through():
    weight = weight_of().requires_grad_()
    upstream = weight_of(seed=3)
    FakeQuantized(how("int2"), None)(weight).backward(upstream)
    assert torch.equal(weight.grad, upstream)


def test_the_gradient_of_a_step_by_hand():
    """int2 (-2 .. 1) in float32, w = (1, -0.5, 0.2, 0), absmax scale 1 / 1.5: w / s = 1.5 (above), -0.75, 0.3, 0.

    d / ds = 1 * 1 + 2 * (-1 + 0.75) + 3 * (0 - 0.3) + 4 * 0; times s for the factor. LSQ's g = 1 / sqrt(n Q) is left out: AdamW and Lion divide it out again.
    """
    weight = torch.tensor([[1.0, -0.5, 0.2, 0.0]], requires_grad=True)
    made = LearnedSteps(how("int2", 4, dtype=torch.float32), None, weight.detach())
    made(weight).backward(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert made.factor.grad.item() == pytest.approx((1 - 0.5 - 0.9) * (1 / 1.5), rel=1e-5)
    assert weight.grad.tolist() == [[0, 2, 3, 4]]


@pytest.mark.parametrize("learned", [True, False])
def test_binary_weights_are_the_sign_of_the_weight_minus_its_mean(learned):
    """BitNet, equations 1 to 3: mean 2.5; mean magnitudes 2.5 and 3.5 of the rows; the gradient of W is that of W~."""
    weight = torch.tensor([[1.0, 4.0, 2.0, 3.0], [5.0, 3.0, 4.0, -2.0]], requires_grad=True)
    rounding = how("binary", 4, search="absmean", dtype=torch.float32)
    made = LearnedSteps(rounding, None, weight.detach()) if learned else FakeQuantized(rounding, None)
    used = made(weight)
    assert used.tolist() == [[-2.5, 2.5, -2.5, 2.5], [3.5, 3.5, 3.5, -3.5]]
    codes, _ = made.finalize(weight.detach(), torch.float32)
    assert torch.equal(codes.dense(), used.detach())
    if not learned:
        used.backward(torch.arange(8.0).reshape(2, 4))
        assert torch.equal(weight.grad, torch.arange(8.0).reshape(2, 4))


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_pruned_is_zero_and_gets_no_gradient(learned, symmetric):
    weight, mask = weight_of(), weight_of(seed=5) > 0
    rounding = how("int3", 16, symmetric)
    made = moved(LearnedSteps(rounding, mask, weight)) if learned else FakeQuantized(rounding, mask)
    parameter = torch.nn.Parameter(weight)
    used = made(parameter)
    used.sum().backward()
    codes, _ = made.finalize(parameter.detach(), torch.float32)
    for found in (used, codes.dense(), parameter.grad):
        assert bool((found[~mask] == 0).all())
    with torch.no_grad():
        made.update(parameter, 1, 2)
    assert bool((parameter[~mask] == 0).all()) and bool((parameter[mask] != 0).all())


def test_steps_stay_positive_and_zero_points_in_the_grid():
    weight = weight_of()
    made = LearnedSteps(how("int2", 16, False), None, weight)
    with torch.no_grad():
        made.factor.fill_(-3.0)
        made.shift.fill_(5.0)
    made.update(torch.nn.Parameter(weight), 1, 2)
    codes, _ = made.finalize(weight, torch.bfloat16)
    assert bool((codes.scale > 0).all()) and set(codes.zero.flatten().tolist()) == {1.0}


def test_gradients_of_steps_make_the_error_smaller():
    weight = weight_of(32, 64)
    made = LearnedSteps(how("int2", 32, False, dtype=torch.float32), None, weight)

    def error():
        return (made(weight) - weight).square().sum()

    start, stepper = error().item(), torch.optim.Adam(made.parameters(), lr=0.01)
    for _ in range(40):
        stepper.zero_grad()
        error().backward()
        stepper.step()
        made.update(torch.nn.Parameter(weight), 1, 2)
    assert error().item() < 0.8 * start
