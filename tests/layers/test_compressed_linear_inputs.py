"""CompressedLinear: a scale of the inputs that changes nothing, and what is stored of how inputs are treated."""

from itertools import permutations

import pytest
import torch
from draws import random
from tolerances import near
from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.checkpoint.formats import FORMATS
from compress.kernels.dispatch import plain_torch
from compress.layers.linear import CompressedLinear
from compress.layers.transforms.permutation import InputPermutation, PermutationScheme
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.layers.transforms.scale import Scale, ScaleScheme
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS

INT8 = GRIDS["int8"]
WIDTH = 12


def dense(transposed):
    torch.manual_seed(1)
    return Conv1D(7, WIDTH) if transposed else nn.Linear(WIDTH, 7)


def scale(seed=0):
    return random(WIDTH, seed=seed).exp()


@pytest.mark.parametrize("transposed", [False, True])
def test_rescaled_inputs_leave_the_function_as_it_was(transposed):
    module, x = dense(transposed), random(3, WIDTH)
    layer = CompressedLinear.of(module)
    weight = layer.weight.clone()
    layer.rescale_input(scale())
    torch.testing.assert_close(layer.weight, weight * scale())
    torch.testing.assert_close(layer(x), module(x))
    layer.rescale_input(scale(1))
    torch.testing.assert_close(layer.transform_of(Scale).scale, scale() * scale(1))
    torch.testing.assert_close(layer(x), module(x))
    layer.absorb_inputs()
    assert not layer.all_transforms
    torch.testing.assert_close(layer.weight, weight)


def test_codes_cannot_be_rescaled_but_can_be_multiplied_out():
    layer = CompressedLinear.of(dense(False))
    layer.rescale_input(scale())
    layer.put(quantize(layer.weight, INT8))
    x, before = random(3, WIDTH), layer(random(3, WIDTH))
    with pytest.raises(AssertionError, match="codes cannot be rescaled"):
        layer.rescale_input(scale())
    layer.absorb_inputs()
    assert layer.codes is None
    torch.testing.assert_close(layer(x), before)


def test_inputs_are_divided_before_they_are_rounded():
    layer, x = CompressedLinear.of(dense(False)), random(3, WIDTH) * torch.linspace(1, 100, WIDTH)
    layer.rescale_input(torch.linspace(1, 100, WIDTH))
    layer.put(quantize(layer.weight, INT8))
    layer.round_inputs(InputRounding.of(INT8))
    wanted = nn.functional.linear(InputRounding.of(INT8)(x / torch.linspace(1, 100, WIDTH)), layer.weight, layer.bias)
    with plain_torch():
        assert near(layer(x), wanted)
    assert near(layer(x), wanted)


def test_a_half_precision_input_stays_in_half_precision():
    layer = CompressedLinear.of(dense(False).to(torch.bfloat16))
    layer.rescale_input(scale())
    assert (
        layer.transform_of(Scale).scale.dtype == torch.float32
    )  # a scale rounded to 8 bits would not undo that of the weight
    assert layer(random(3, WIDTH).to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("static", [False, True])
def test_inputs_in_half_precision_are_rounded_to_the_codes_of_float32(static):
    x = random(64, 256).to(torch.bfloat16)
    rounding = InputRounding.of(INT8, torch.tensor([0.03125]) if static else None)
    wanted = rounding(x.float())
    assert torch.equal(rounding(x), wanted.to(torch.bfloat16))


def full():
    """A layer with everything that can be stored about inputs."""
    layer = CompressedLinear.of(dense(False))
    layer.permute_input(torch.arange(WIDTH).roll(5))
    layer.rescale_input(scale())
    layer.put(quantize(layer.weight, INT8))
    layer.round_inputs(InputRounding.of(INT8, torch.tensor([0.01]), 6.0, torch.arange(WIDTH) == 3))
    return layer


def test_what_is_stored_reads_back_as_the_same_layer():
    layer, format_ = full(), FORMATS["native"]
    kinds = (PermutationScheme(), ScaleScheme(), RoundingScheme(INT8, "static", 6.0, True))
    assert layer.scheme.transforms == kinds and layer.scheme.rounding == kinds[2]
    tensors = format_.encode(layer.scheme, layer.all_parts, layer.all_transforms)
    assert tensors.keys() == layer.tensors().keys() == layer.scheme.tensors().keys()
    read = CompressedLinear(torch.zeros(7, WIDTH), layer.bias)
    read.read(*format_.decode(tensors, layer.scheme))
    x = random(3, WIDTH)
    assert torch.equal(read(x), layer(x))
    assert read.sha256() == layer.sha256()
    assert read.scheme == layer.scheme


@pytest.mark.parametrize("kind", [InputPermutation, Scale, InputRounding])
def test_the_digest_covers_all_that_is_done_to_inputs(kind):
    changed = full()
    changed.drop_transform(changed.transform_of(kind))
    assert changed.sha256() != full().sha256()


@pytest.mark.parametrize(
    "rounding",
    [
        InputRounding.of(INT8, None, 6.0, torch.arange(WIDTH) == 3),
        InputRounding.of(INT8, torch.tensor([0.02]), 6.0, torch.arange(WIDTH) == 3),
        InputRounding.of(INT8, torch.tensor([0.01]), None, torch.arange(WIDTH) == 3),
        InputRounding.of(INT8, torch.tensor([0.01]), 6.0, torch.arange(WIDTH) == 4),
        InputRounding.of(INT8, torch.tensor([0.01]), 6.0, None),
        InputRounding.of(INT8, torch.tensor([0.01]), 6.0, torch.arange(WIDTH) == 3, symmetric=False),
    ],
)
def test_the_digest_covers_how_inputs_are_rounded(rounding):
    changed = full()
    changed.round_inputs(rounding)
    assert changed.sha256() != full().sha256()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_transforms_are_applied_in_the_order_of_their_ranks(order):
    layer, wanted = CompressedLinear.of(dense(False)), full()
    for i in order:
        layer.set_transform(wanted.all_transforms[i])
    assert [t.kind for t in layer.all_transforms] == ["permutation", "scale", "rounding"]
    layer.put(wanted.all_parts)
    x = random(3, WIDTH)
    assert torch.equal(layer(x), wanted(x))
    inside = (x[:, wanted.input_permutation] / wanted.transform_of(Scale).scale).to(x.dtype)
    torch.testing.assert_close(layer(x), nn.functional.linear(wanted.rounding(inside), layer.weight, layer.bias))


def test_all_that_is_linear_can_be_taken_back():
    module, x = dense(False), random(3, WIDTH)
    layer = CompressedLinear.of(module)
    layer.permute_input(torch.arange(WIDTH).roll(5))
    layer.rescale_input(scale())
    layer.permute_input(torch.arange(WIDTH).flip(0))
    layer.round_inputs(InputRounding.of(INT8, columns=torch.arange(WIDTH) == 3))
    spared = int(layer.input_permutation[3])
    layer.absorb_inputs()
    assert layer.all_transforms == [layer.rounding]
    assert layer.rounding.columns.nonzero().flatten().tolist() == [spared]
    layer.round_inputs(None)
    torch.testing.assert_close(layer.weight, module.weight)
    torch.testing.assert_close(layer(x), module(x))


def test_a_dense_layer_is_plain_until_something_is_done_to_its_inputs():
    layer = CompressedLinear.of(dense(False))
    assert layer.scheme.plain and not layer.quantized and layer.codes is None
    layer.rescale_input(scale())
    assert not layer.scheme.plain and not layer.quantized
