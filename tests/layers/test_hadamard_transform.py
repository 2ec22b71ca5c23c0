"""The Hadamard transform of inputs: by hand, undone by its inverse in the weight, and with transforms of later passes."""

import json

import pytest
import torch
from draws import random
from torch import nn

from compress.layers.linear import CompressedLinear
from compress.layers.scheme import LayerScheme
from compress.layers.transforms.hadamard import Hadamard, HadamardScheme
from compress.models.structure.rewrite import rotate_inputs


def rotated(out=6, width=48, block=48):
    """(a linear, the same with rotated inputs)."""
    plain = nn.Linear(width, out)
    layer = CompressedLinear.of(plain)
    rotate_inputs(layer, Hadamard.of(block, 0, layer.shape))
    return plain, layer


def close(one, other):
    return torch.allclose(one, other, atol=1e-5)


def test_four_channels_by_hand():
    """Signs first, then rows of the matrix of order 2 times itself, over the root of 4; two blocks of 2 likewise."""
    found = Hadamard.of(4, 0, (1, 4))
    found.signs = torch.tensor([1, -1, 1, 1], dtype=torch.int8)
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert found(x).tolist() == [[3.0, 1.0, -4.0, 2.0]]
    halves = Hadamard.of(2, 0, (1, 4))
    halves.signs = found.signs
    assert close(halves(x) * 2**0.5, torch.tensor([[-1.0, 3.0, 7.0, -1.0]]))


@pytest.mark.parametrize("block", [48, 12, 4])
@torch.no_grad()
def test_the_function_stays_and_the_weight_takes_it_back(block):
    plain, layer = rotated(block=block)
    x = random(5, 48)
    assert close(layer(x), plain(x)) and not close(layer.weight, plain.weight)
    absorbed = layer.absorb_inputs()
    assert (
        [t.kind for t in absorbed] == ["hadamard"] and close(layer.weight, plain.weight) and close(layer(x), plain(x))
    )


@torch.no_grad()
def test_later_scales_and_permutations_are_for_rotated_columns():
    plain, layer = rotated()
    x, scale, order = random(5, 48), random(48).abs() + 0.5, torch.randperm(48)
    layer.rescale_input(scale)
    layer.permute_input(order)
    assert [t.kind for t in layer.all_transforms] == ["hadamard", "permutation", "scale"] and layer.scheme.mixes
    assert close(layer(x), plain(x))
    layer.absorb_inputs()
    assert not layer.all_transforms and close(layer(x), plain(x))


def test_it_is_read_from_plain_json_and_tensors():
    _, layer = rotated(block=12)
    scheme = LayerScheme.from_json(json.loads(json.dumps(layer.scheme.to_json())))
    assert scheme == layer.scheme and scheme.transforms == (HadamardScheme(12),)
    assert scheme.transforms[0].size_bytes((6, 48), torch.float32) == 48
    parts, transforms = scheme.read(layer.tensors())
    again = CompressedLinear(torch.zeros(6, 48), layer.bias)
    again.read(parts, transforms)
    assert again.sha256() == layer.sha256()


def test_a_file_with_another_transform_is_an_error():
    _, layer = rotated()
    tensors = layer.tensors()
    wrong = LayerScheme((6, 48), layer.scheme.parts, (HadamardScheme(32),))
    with pytest.raises(ValueError, match="order 32 does not fit 48 inputs"):
        wrong.read(tensors)
    with pytest.raises(ValueError, match="order 6 does not fit 48 inputs"):
        LayerScheme((6, 48), layer.scheme.parts, (HadamardScheme(6),)).read(tensors)
    tensors["input_hadamard_signs"] = torch.zeros(48, dtype=torch.int8)
    with pytest.raises(ValueError, match="input_hadamard_signs holds other numbers than 1 and -1"):
        layer.scheme.read(tensors)
    with pytest.raises(ValueError, match="must be at least 1"):
        HadamardScheme(0).check()
