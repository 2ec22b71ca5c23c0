"""The loss of a model with rotated and rounded inputs, and its gradient, worked out by hand."""

from pathlib import Path

import pytest
import torch
from launching import finish, fork
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.errors import RecipeError
from compress.layers.transforms.hadamard import Hadamard
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.numerics.hadamard import random_orthogonal
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.rounding import GridOptions
from compress.train.fake_quantized import FakeQuantized
from compress.train.rotations import FullRotation, HeadRotation, OnlineHadamard, RotatedLinear, rotated

TURN = [[0.6, -0.8], [0.8, 0.6]]
STEP = 2.6 / 7.5  # of int4: the largest magnitude of x R = [2.6, -1.8] over half the range of codes, 7.5


def rounding(width):
    return InputRounding(RoundingScheme(GRIDS["int4"]), (1, width), {})


class One(nn.Module):
    """One linear without a bias, [1, 2], as linear or as Conv1D."""

    def __init__(self, transposed=False):
        super().__init__()
        self.linear = Conv1D(1, 2) if transposed else nn.Linear(2, 1, bias=False)
        weight = torch.tensor([[1.0, 2.0]])
        self.linear.weight = nn.Parameter(weight.T.contiguous() if transposed else weight, requires_grad=False)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("transposed", [False, True])
def test_rounded_inputs_by_hand(transposed):
    """x R = [2.6, -1.8] becomes [7, -5] steps (7.5 is above the largest code); W R = [2.2, 0.4].

    dy/dR_ij = x_i (W R)_j + W_i Q_j: the first term through the rounding, as if it were not there.
    """
    rotation, model = nn.Parameter(torch.tensor(TURN)), One(transposed)
    layer = RotatedLinear([FullRotation(rotation)], [], rounding(2))
    with rotated(model, {"hidden": rotation}, {"linear": layer}) as student:
        assert list(student.named()) == ["hidden"] and "learned_rotations.hidden" in dict(model.named_parameters())
        found = model(torch.tensor([[3.0, 1.0]]))
        found.sum().backward()
    assert float(found) == pytest.approx(STEP * (7 * 2.2 - 5 * 0.4))
    through, beside = torch.outer(torch.tensor([3.0, 1.0]), torch.tensor([2.2, 0.4])), torch.tensor([[1.0], [2.0]])
    assert torch.allclose(rotation.grad, through + beside * STEP * torch.tensor([7.0, -5.0]))
    assert float(model(torch.tensor([[3.0, 1.0]]))) == 5.0 and not list(model.children())[1:]


def test_rounded_weights_by_hand():
    """W R = [2.2, 0.4] becomes [7, 1] steps of 2.2 / 7.5: its quotients are 7.5 and 1.36."""
    rotation, model = nn.Parameter(torch.tensor(TURN)), One()
    weight = FakeQuantized(GridOptions(GRIDS["int4"], "channel", True, "absmax", torch.float32), None)
    layer = RotatedLinear([FullRotation(rotation)], [], rounding(2), weight)
    with rotated(model, {"hidden": rotation}, {"linear": layer}):
        found = model(torch.tensor([[3.0, 1.0]]))
    assert float(found) == pytest.approx(STEP * 2.2 / 7.5 * (7 * 7 - 5 * 1), rel=1e-6)


def test_outputs_are_rotated_back():
    """Without rounding every rotation of inputs and outputs cancels; the rotated weight is B^T W R."""
    turn, back, head = (random_orthogonal(size, size).float() for size in (8, 6, 3))
    weight, x = torch.randn(6, 8), torch.randn(5, 8)
    layer = RotatedLinear([FullRotation(turn)], [FullRotation(back)])
    assert torch.allclose(layer.rotated_weight(weight), back.T @ weight @ turn, atol=1e-5)
    assert torch.allclose(layer.product(x, weight), x @ weight.T, atol=1e-5)
    heads = HeadRotation(head, torch.tensor([[0, 1, 2], [5, 4, 3]]))  # channels in another order, and two that stay
    wanted = torch.cat([x[:, :3] @ head, (x[:, [5, 4, 3]] @ head).flip(1), x[:, 6:]], dim=1)
    assert torch.allclose(heads.forward(x), wanted, atol=1e-6)
    online = OnlineHadamard(Hadamard.of(8, 0, (6, 8)))
    for one in (heads, online):
        assert torch.allclose(one.apply_transposed(one.forward(x)), x, atol=1e-5) and not torch.allclose(
            one.forward(x), x
        )


def test_linears_that_read_one_tensor_share_the_rounding():
    rotation, model, calls = nn.Parameter(torch.tensor(TURN)), nn.ModuleList([One(), One(), One()]), []

    class Counted(FullRotation):
        def forward(self, x):
            calls.append(x)
            return super().forward(x)

    turn = Counted(rotation)
    layers = {f"{i}.linear": RotatedLinear([turn], [], rounding(2)) for i in range(3)}
    x, other = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 2.0]])
    with rotated(model, {"hidden": rotation}, layers):
        first, second, third = model[0](x), model[1](x), model[2](other)
        with torch.no_grad():
            fourth = model[2](other)
    assert len(calls) == 3 and float(first) == float(second) != float(third) == float(fourth)


def test_sharded_rotations_are_an_error():
    rotation, model = nn.Parameter(torch.tensor(TURN)), One()
    with (
        rotated(
            model, {"hidden": rotation}, {"linear": RotatedLinear([FullRotation(rotation)])}, "passes[0] rotate"
        ) as student,
        pytest.raises(
            RecipeError, match=r"passes\[0\] rotate: the launcher uses FSDP, .*; launch with --multi_gpu, or"
        ),
    ):
        student.split(torch.device("cpu"), 2, True)


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_accumulation(tmp_path):
    script = str(Path(__file__).with_name("rotations_in_processes.py"))
    for name, accumulate, processes in (("two", 1, 2), ("one", 2, 1), ("other", 1, 1)):
        for code, _, errors in finish(fork([script, str(tmp_path / name), str(accumulate)], processes)):
            assert code == 0, errors
    found = {path.name: load_file(path)["rotated"] for path in tmp_path.iterdir()}
    assert torch.equal(found["two-0"], found["two-1"]) and torch.allclose(found["two-0"], found["one-0"], atol=1e-5)
    assert not torch.allclose(found["two-0"], found["other-0"], atol=1e-4)
