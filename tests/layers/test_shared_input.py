"""Linears that share an input are computed in one call, and give what they give alone."""

import copy
import pickle

import pytest
import torch
from torch import nn

from compress.checkpoint.inference import share_inputs
from compress.kernels import dispatch
from compress.layers.linear import CompressedLinear
from compress.layers.transforms.rounding import InputRounding
from compress.layers.transforms.scale import Scale
from compress.native.library import library
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels were not built")


def layer(rows, seed=0, rounded=False):
    generator = torch.Generator().manual_seed(seed)
    found = CompressedLinear(quantize(torch.randn(rows, 64, generator=generator), GRIDS["int4"], 32), None)
    if rounded:
        found.round_inputs(InputRounding.of(GRIDS["int8"]))
    return found


class Attention(nn.Module):
    def __init__(self, rounded=False):
        super().__init__()
        self.q, self.k, self.v = (layer(rows, rows, rounded) for rows in (64, 16, 32))
        self.out = layer(64, 5, rounded)
        self.change = self.skip = False

    def forward(self, x):
        q = self.q(x)
        if self.skip:
            return self.out(q)
        if self.change:
            x.mul_(2)
        return self.out(q) + torch.cat([self.k(x), self.v(x), self.k(x)], -1)


@pytest.fixture
def calls(monkeypatch):
    """The numbers of layers that were computed together."""
    found, linears = [], dispatch.linears

    def counted(x, parts, rounding, biases):
        done = linears(x, parts, rounding, biases)
        found.append(len(parts) if done is not None else 0)
        return done

    monkeypatch.setattr(dispatch, "linears", counted)
    return found


def alone(model, x):
    found = copy.deepcopy(model)
    for module in found.modules():
        if isinstance(module, CompressedLinear):
            module.shared_input = None
    with torch.no_grad():
        return found(x.clone())


@pytest.mark.parametrize("rounded", [False, True])
def test_layers_with_one_input_are_computed_in_one_call_from_the_second_on(calls, rounded):
    model = Attention(rounded)
    share_inputs(model)
    with torch.no_grad():
        for i in range(4):
            x = torch.randn(1 + i, 64)
            assert torch.equal(model(x), alone(model, x))
    assert calls == [3, 3, 3]


@torch.no_grad()
def test_an_input_that_changes_in_between_is_noticed():
    model = Attention()
    share_inputs(model)
    model(torch.randn(2, 64))
    model.change = True
    for _ in range(3):
        x = torch.randn(2, 64)
        assert torch.equal(model(x.clone()), alone(model, x))


@torch.no_grad()
def test_outputs_that_nobody_takes_end_the_set(calls):
    model = Attention()
    share_inputs(model)
    model(torch.randn(2, 64))
    model.skip = True
    for _ in range(3):
        x = torch.randn(2, 64)
        assert torch.equal(model(x), alone(model, x))
    assert calls == [3]


@torch.no_grad()
def test_layers_that_cannot_be_computed_together():
    """Different roundings, transforms before the product, tensors of inference, dtypes without a kernel."""
    model = Attention()
    model.k.round_inputs(InputRounding.of(GRIDS["int8"]))
    model.v.set_transform(Scale.of(torch.full((64,), 2.0), (32, 64)))
    share_inputs(model)
    for x in (torch.randn(2, 64), torch.randn(2, 64), torch.randn(2, 64).half()):
        assert torch.equal(model(x), alone(model, x))
    with torch.inference_mode():
        assert torch.equal(model(torch.ones(2, 64)), alone(model, torch.ones(2, 64)))


@torch.no_grad()
def test_a_weight_that_is_replaced_is_used():
    model, x = Attention(), torch.randn(2, 64)
    share_inputs(model)
    model(x), model(x)
    model.k.put(layer(16, seed=9).all_parts[0])
    assert torch.equal(model(x), alone(model, x))


@torch.no_grad()
def test_copies_learn_anew():
    model, x = Attention(), torch.randn(2, 64)
    share_inputs(model)
    model(x), model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.q.shared_input is other.k.shared_input is not model.q.shared_input
        assert torch.equal(other(x), model(x)) and torch.equal(other(x), model(x))


def test_gradients_go_through_each_layer():
    model, x = Attention(), torch.randn(2, 64, requires_grad=True)
    share_inputs(model)
    for _ in range(2):
        model(x).sum().backward()
    assert x.grad is not None
