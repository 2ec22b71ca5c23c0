"""Reassembly of input channels: by hand, folded into a weight, exact where merged channels are equal, and stored."""

import pytest
import torch
from draws import random

from compress.layers.linear import CompressedLinear
from compress.layers.transforms.reassembly import Reassembly

PAIRS, PARTS = torch.tensor([[0, 1], [4, 5]]), torch.tensor([1, 1, 3, 1, 1, 1])


def made():
    """Channels 0 and 1, and 4 and 5, are merged; the third is split into three."""
    return Reassembly.of(PAIRS, PARTS, (2, 6))


def test_by_hand():
    x = torch.tensor([[1.0, 3.0, 30.0, 7.0, 10.0, 20.0]])
    torch.testing.assert_close(made()(x), torch.tensor([[2.0, 10.0, 10.0, 7.0, 15.0, 10.0]]))
    weight = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    assert made().adapted(weight).tolist() == [[3.0, 3.0, 3.0, 4.0, 11.0, 3.0]]


def test_the_output_is_that_of_merged_channels():
    """Splitting is exact; merging replaces both channels by their mean."""
    x, weight = random(5, 6), random(2, 6, seed=1)
    merged = x.clone()
    for pair in PAIRS:
        merged[:, pair] = x[:, pair].mean(1, keepdim=True)
    torch.testing.assert_close(made()(x) @ made().adapted(weight).T, merged @ weight.T)


def test_it_can_be_folded_into_a_weight():
    x, weight = random(5, 6), random(2, 6, seed=1)
    torch.testing.assert_close(x @ made().absorbed(weight).T, made()(x) @ weight.T)
    assert made()(x.bfloat16()).dtype == torch.bfloat16


def test_it_is_stored_and_read_exactly():
    layer = CompressedLinear(random(2, 6), None)
    layer.set_transform(made())
    tensors = layer.tensors()
    assert sorted(n for n in tensors if n.startswith("input_")) == [
        "input_reassembly_first",
        "input_reassembly_scale",
        "input_reassembly_second",
    ]
    scheme = type(layer.scheme).from_json(layer.scheme.to_json())
    assert scheme.read(tensors)[1][0].sha256() == made().sha256()
    tensors["input_reassembly_second"] = torch.full((6,), 6, dtype=torch.int32)
    with pytest.raises(ValueError, match="input_reassembly_second holds a channel outside of the 6 inputs"):
        scheme.read(tensors)
