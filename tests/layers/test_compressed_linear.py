"""CompressedLinear: the same function as the layer it replaces, dense or packed, masked, with rounded inputs."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.layers.linear import CompressedLinear, linears, replace_linear
from compress.layers.parts.codes import CodesPart
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS


def conv1d() -> Conv1D:
    torch.manual_seed(0)
    layer = Conv1D(5, 8)  # 8 inputs, 5 outputs
    nn.init.normal_(layer.bias)
    return layer


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 5), lambda: nn.Linear(8, 5, bias=False), conv1d])
def test_it_is_the_function_of_the_layer_and_shares_its_weight(make, x):
    torch.manual_seed(0)
    dense = make()
    layer = CompressedLinear.of(dense)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-6, atol=1e-6)
    assert layer.shape == (5, 8) and layer.codes is None
    assert layer.transposed == isinstance(dense, Conv1D)
    assert layer.weight.untyped_storage().data_ptr() == dense.weight.untyped_storage().data_ptr()
    assert (layer.bias is None) == (dense.bias is None)
    assert CompressedLinear.of(layer) is layer
    assert not any(p.requires_grad for p in layer.parameters())


@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 5), conv1d])
def test_codes_take_the_place_of_the_weight_and_keep_the_bias(make, x):
    dense = make()
    layer = CompressedLinear.of(dense)
    codes = quantize(layer.weight, GRIDS["int4"], 4)
    layer.put(codes)
    assert layer.quantized and layer.shape == (5, 8)
    assert torch.equal(layer.weight, codes.dense())
    torch.testing.assert_close(layer(x), x @ codes.dense().T + dense.bias)
    assert layer.codes.sha256() == CodesPart.of(codes).sha256()
    assert set(layer.state_dict()) == {"bias", "parts.0.words", "parts.0.scale"}
    layer.put(codes.dense())
    assert layer.codes is None and torch.equal(layer.weight, codes.dense())
    assert set(layer.state_dict()) == {"bias", "parts.0.weight"}


def test_a_mask_stays_until_another_is_given():
    layer = CompressedLinear.of(nn.Linear(4, 2, bias=False))
    mask = torch.tensor([[True, False, True, False]] * 2)
    layer.put(layer.weight * mask, mask)
    layer.put(quantize(layer.weight, GRIDS["int4"], 4, mask=mask))
    assert torch.equal(layer.mask, mask) and bool((layer.weight[~mask] == 0).all())
    layer.put(layer.weight, ~mask)
    assert torch.equal(layer.mask, ~mask)
    assert "masked" in repr(layer)


def test_inputs_are_rounded_one_token_at_a_time(x):
    layer = CompressedLinear.of(nn.Linear(8, 5))
    dense = layer(x)
    layer.round_inputs(InputRounding.of(GRIDS["int8"]))
    found = layer(x)
    assert not torch.equal(found, dense)
    torch.testing.assert_close(
        found, nn.functional.linear(InputRounding.of(GRIDS["int8"])(x), layer.weight, layer.bias)
    )
    alone = torch.stack([layer(token) for token in x.reshape(-1, 8)]).reshape(2, 3, 5)
    torch.testing.assert_close(alone, found)  # no token changes another


def test_a_token_by_hand():
    token = torch.tensor([[127.0, -63.6, 0.4, 0.0]])
    assert InputRounding.of(GRIDS["int8"])(token).tolist()[0] == pytest.approx([127.0, -64.0, 0.0, 0.0], abs=0.6)
    zero = torch.zeros(2, 4)
    assert torch.equal(InputRounding.of(GRIDS["int8"])(zero), zero)


def test_the_weight_in_another_dtype():
    layer = CompressedLinear.of(nn.Linear(8, 5))
    assert layer.weight_as(torch.bfloat16).dtype == torch.bfloat16
    layer.put(quantize(layer.weight, GRIDS["int4"], 4, dtype=torch.bfloat16))
    assert layer.weight.dtype == torch.float32 or layer.weight.dtype == layer.codes.scale.dtype
    assert layer.weight_as(torch.float16).dtype == torch.float16


def test_linears_are_found_by_name_and_replaced_in_place(x):
    root = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"a": conv1d(), "norm": nn.LayerNorm(5)}))
    assert list(linears(root)) == ["0", "1.a"]
    wanted = root[1]["a"](x)
    new = replace_linear(root, "1.a")
    assert root[1]["a"] is new and replace_linear(root, "1.a") is new
    torch.testing.assert_close(new(x), wanted)
    assert list(linears(root)) == ["0", "1.a"]
