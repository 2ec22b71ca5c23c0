"""Dispatch: the first registered kernel that supports a call computes it; the reference computes the rest."""

import pytest
import torch

from compress.kernels import dispatch, reference
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.packed import PackedCodes


class Fake:
    """Answers a constant for calls with few rows."""

    def __init__(self, answer, rows):
        self.answer, self.rows = answer, rows

    def supports(self, x, packed):
        return x.shape[0] <= self.rows

    def linear(self, x, packed, bias):
        return torch.full((x.shape[0], packed.shape[0]), self.answer)


@pytest.fixture
def packed():
    return PackedCodes.of(quantize(torch.arange(12.0).reshape(3, 4), GRIDS["int4"], 4))


def test_the_first_that_supports_the_call(packed, monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", [Fake(1.0, 1), Fake(2.0, 2)])
    bias = torch.ones(3)
    for rows, answer in ((1, 1.0), (2, 2.0)):
        assert torch.equal(dispatch.linear(torch.ones(rows, 4), packed, bias), torch.full((rows, 3), answer))
    x = torch.ones(3, 4)
    assert torch.equal(dispatch.linear(x, packed, bias), reference.linear(x, packed, bias))


def test_without_kernels_it_is_the_reference(packed, monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", [])
    x = torch.ones(2, 4)
    assert torch.equal(dispatch.linear(x, packed, None), reference.linear(x, packed, None))
