"""CompressedLinear: a scale of the inputs that changes nothing, and what is stored of how inputs are treated."""

import pytest
import torch
from draws import random
from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.formats import FORMATS
from compress.model.linear import CompressedLinear
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.weights.transforms.rounding import InputRounding

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
    torch.testing.assert_close(layer.input_scale, scale() * scale(1))
    torch.testing.assert_close(layer(x), module(x))
    layer.absorb_input_scale()
    assert layer.input_scale is None
    torch.testing.assert_close(layer.weight, weight)


def test_codes_cannot_be_rescaled_but_can_be_multiplied_out():
    layer = CompressedLinear.of(dense(False))
    layer.rescale_input(scale())
    layer.put(quantize(layer.weight, INT8))
    x, before = random(3, WIDTH), layer(random(3, WIDTH))
    with pytest.raises(AssertionError, match="codes cannot be rescaled"):
        layer.rescale_input(scale())
    layer.absorb_input_scale()
    assert layer.codes is None
    torch.testing.assert_close(layer(x), before)


def test_inputs_are_divided_before_they_are_rounded():
    layer, x = CompressedLinear.of(dense(False)), random(3, WIDTH) * torch.linspace(1, 100, WIDTH)
    layer.rescale_input(torch.linspace(1, 100, WIDTH))
    layer.put(quantize(layer.weight, INT8))
    layer.round_inputs(InputRounding.of(INT8))
    wanted = nn.functional.linear(InputRounding.of(INT8)(x / torch.linspace(1, 100, WIDTH)), layer.weight, layer.bias)
    assert torch.equal(layer(x), wanted)


def test_a_half_precision_input_stays_in_half_precision():
    layer = CompressedLinear.of(dense(False).to(torch.bfloat16))
    layer.rescale_input(scale())
    assert layer.input_scale.dtype == torch.float32  # a scale rounded to 8 bits would not undo that of the weight
    assert layer(random(3, WIDTH).to(torch.bfloat16)).dtype == torch.bfloat16


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
    assert layer.scheme.input_permuted and layer.scheme.input_scaled and layer.scheme.outlier_columns
    assert (layer.scheme.activation_scale, layer.scheme.outlier_threshold) == ("static", 6.0)
    sizes = {name: (t.numel(), t.dtype) for name, t in layer.input_tensors().items()}
    assert sizes == {n: (length, dtype or torch.float32) for n, (length, dtype) in layer.scheme.input_tensors.items()}
    assert set(format_.input_names) == set(sizes)
    read = CompressedLinear(torch.zeros(7, WIDTH), layer.bias)
    read.read(format_.decode(format_.encode(layer.codes, INT8), layer.scheme), layer.scheme, layer.input_tensors())
    x = random(3, WIDTH)
    assert torch.equal(read(x), layer(x))
    assert read.sha256() == layer.sha256()
    assert read.scheme == layer.scheme


@pytest.mark.parametrize(
    "name", ["input_permutation", "input_scale", "activation_scale", "outliers", "outlier_threshold"]
)
def test_the_digest_covers_all_that_is_done_to_inputs(name):
    changed = full()
    setattr(changed, name, None)
    assert changed.sha256() != full().sha256()


def test_a_dense_layer_has_neither_scheme_nor_digest():
    layer = CompressedLinear.of(dense(False))
    assert layer.scheme is None and layer.sha256() is None
