"""A packed linear in training: its forward and its gradients against autograd on the dense formula."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from compress.layers.linear import CompressedLinear
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.dense import DensePart
from compress.layers.transforms.rounding import InputRounding
from compress.layers.transforms.scale import Scale
from compress.numerics.quant.codes import Codes, quantize
from compress.numerics.quant.grids import GRIDS
from compress.train.linear import SMALLEST_FACTOR, TrainedLinear, scaled_product

INT4 = GRIDS["int4"]


def weight_of(rows=6, width=20, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def codes_of(grid="int4", group_size=8, symmetric=True, indexed=False, dtype=torch.float32) -> Codes:
    codes = quantize(weight_of(), GRIDS[grid], group_size, symmetric, dtype=dtype)
    if indexed:
        index = torch.tensor([j % codes.scale.shape[1] for j in range(codes.shape[1])], dtype=torch.int32)
        codes = replace(codes, group_index=index)
    return codes


def dense_by_loops(codes: Codes, factor: torch.Tensor) -> torch.Tensor:
    """(code - zero) * scale * factor, weight by weight, with gradients to the factor."""
    unit = replace(codes, scale=torch.ones_like(codes.scale, dtype=torch.float32)).dense()
    rows, width = codes.shape
    found = []
    for i in range(rows):
        for j in range(width):
            if codes.group_index is not None:
                place = i, int(codes.group_index[j])
            elif isinstance(codes.group_size, int):
                place = i, j // codes.group_size
            else:
                place = (i, 0) if codes.group_size == "channel" else (0, 0)
            found.append(unit[i, j] * codes.scale[place].float() * factor[place])
    return torch.stack(found).view(rows, width)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"symmetric": False},
        {"group_size": 10},
        {"group_size": "channel"},
        {"group_size": "tensor"},
        {"grid": "int3", "group_size": 5},
        {"grid": "nf4", "group_size": 4},
        {"grid": "fp8_e4m3", "group_size": "channel"},
        {"indexed": True},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_forward_and_gradients_are_those_of_the_dense_formula(asked):
    """group_size 8 leaves a short last group of 4 columns."""
    codes = codes_of(**asked)
    packed = CodesPart.of(codes)
    draw = torch.Generator().manual_seed(1)
    start = 1 + 0.1 * torch.randn(codes.scale.shape, generator=draw)
    x, top = torch.randn(2, 5, 20, generator=draw), torch.randn(2, 5, 6, generator=draw)
    found = [x.clone().requires_grad_(), start.clone().requires_grad_()]
    wanted = [x.clone().requires_grad_(), start.clone().requires_grad_()]
    y = scaled_product(found[0], found[1], packed)
    z = wanted[0] @ dense_by_loops(codes, wanted[1]).T
    assert torch.allclose(y, z, atol=1e-4)
    (y * top).sum().backward()
    (z * top).sum().backward()
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_gradient_by_hand():
    """Two groups of one weight each: dL/dfactor = dL/dy * x * code * scale."""
    packed = CodesPart.of(Codes(torch.tensor([[3, -2]]).to(torch.int8), torch.tensor([[0.5, 2.0]]), None, INT4, 1))
    x, factor = torch.tensor([[10.0, 1.0]], requires_grad=True), torch.tensor([[1.0, 3.0]], requires_grad=True)
    y = scaled_product(x, factor, packed)
    assert y.item() == 10 * 3 * 0.5 + 1 * -2 * 2 * 3
    (2 * y).backward()
    assert factor.grad.tolist() == [[2 * 10 * 3 * 0.5, 2 * 1 * -2 * 2]]
    assert x.grad.tolist() == [[2 * 3 * 0.5, 2 * -2 * 2 * 3]]


def test_nothing_dense_is_kept_for_the_backward_pass():
    packed = CodesPart.of(codes_of())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        for factor in (None, torch.ones_like(packed.scale).requires_grad_()):
            scaled_product(torch.randn(4, 20, requires_grad=True), factor, packed)
        assert kept == [(4, 20), (6, 3)]
        nn.functional.linear(torch.randn(4, 20, requires_grad=True), weight_of())
    assert (20, 6) in kept, "what a plain linear does"


def trained(codes=None, bias=True, mask=None) -> TrainedLinear:
    layer = CompressedLinear.of(nn.Linear(20, 6, bias=bias).requires_grad_(False))
    layer.put(weight_of() if codes is None else codes, mask)
    return TrainedLinear(layer)


def test_before_a_step_it_is_the_layer_itself():
    x = torch.randn(3, 20)
    for codes in (None, codes_of(), codes_of("mxfp4", 4)):
        linear = trained(codes)
        wanted = linear.layer(x)
        assert torch.allclose(linear(x), wanted, atol=1e-5)


def test_inputs_are_scaled_and_rounded_as_in_the_layer_and_gradients_pass_straight_through():
    linear = trained(codes_of())
    scale = torch.linspace(0.5, 2, 20)
    linear.layer.set_transform(Scale.of(scale, linear.layer.shape))
    x = torch.randn(3, 20, requires_grad=True)
    x.data[1, 4] = 30.0  # above the threshold: its column is left as it is
    linear.layer.round_inputs(InputRounding.of(GRIDS["int8"], threshold=6.0))
    y = linear(x)
    assert torch.allclose(y, linear.layer(x.detach()), atol=1e-5)
    y.sum().backward()
    wanted = linear.layer.weight.sum(0) / scale
    assert torch.allclose(x.grad, wanted.expand_as(x), atol=1e-5)


def test_settling_changes_scales_alone_and_rounds_them_to_storage():
    codes = codes_of(symmetric=False, dtype=torch.bfloat16)
    linear = trained(codes)
    before = linear.layer.codes
    factor = linear.train_scales()["factor"]
    with torch.no_grad():
        factor[0, 0], factor[2, 1] = 1.1, 0.9
    after = linear.finalize(torch.bfloat16, torch.float32).codes
    moved = (after.scale != before.scale).nonzero().tolist()
    assert moved == [[0, 0], [2, 1]]
    assert after.scale[0, 0] == (before.scale[0, 0].float() * 1.1).to(torch.bfloat16).to(before.scale.dtype)
    for name in ("words", "zero"):
        assert torch.equal(getattr(after, name), getattr(before, name))
    assert (after.grid, after.group_size, after.shape) == (before.grid, before.group_size, before.shape)


def test_factors_stay_positive():
    linear = trained(codes_of())
    factor = linear.train_scales()["factor"]
    with torch.no_grad():
        factor[0, 0] = -3.0
    linear.update(1, 2)
    assert factor[0, 0].item() == pytest.approx(SMALLEST_FACTOR)


def test_pruned_weights_get_no_gradient_and_stay_zero():
    mask = torch.rand(6, 20, generator=torch.Generator().manual_seed(2)) > 0.5
    linear = trained(mask=mask)
    linear.layer.put(weight_of() * mask)
    weight = linear.train_weight()
    linear(torch.randn(3, 20)).square().sum().backward()
    assert bool((weight.grad[~mask] == 0).all()) and bool((weight.grad[mask] != 0).all())
    with torch.no_grad():
        weight += 1.0
    linear.update(1, 2)
    assert bool((weight[~mask] == 0).all())
    assert bool((linear.finalize(torch.float32, torch.float32).weight[~mask] == 0).all())


def test_under_autocast_products_are_in_bfloat16_and_gradients_in_float32():
    linear = trained(codes_of(), bias=True)
    factor = linear.train_scales()["factor"]
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(torch.randn(3, 20))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert factor.grad.dtype == torch.float32 and bool((factor.grad != 0).any())


def test_the_scales_of_the_parts_that_have_any_are_trained_and_the_others_stay():
    codes, dense = CodesPart.of(codes_of()), DensePart.of(weight_of(seed=3))
    layer = CompressedLinear.of(nn.Linear(20, 6).requires_grad_(False))
    layer.put([dense, codes])
    for unpacked in (False, True):
        linear, x = TrainedLinear(layer, unpacked), torch.randn(3, 20)
        factor = linear.train_scales()["factor"]
        assert torch.allclose(linear(x), layer(x), atol=1e-5)
        with torch.no_grad():
            factor[0, 0] = 1.5
        y = linear(x)
        y.sum().backward()
        assert bool((factor.grad != 0).any())
        trained = codes.with_scale(codes.scale * factor.detach())
        weight = dense.weight + trained.dense(torch.float32)
        assert torch.allclose(y, nn.functional.linear(x, weight, layer.bias), atol=1e-4)
    after = linear.finalize(torch.float32, torch.float32)
    assert after.all_parts[0] is dense and after.all_parts[1].scheme == codes.scheme
    assert torch.equal(after.all_parts[1].scale, trained.scale)


def test_weight_and_bias_can_be_read_without_calling_the_layer():
    """Mixers of Mamba multiply by the weight of a linear themselves; nothing of the layer may be missing there."""
    plain = nn.Linear(4, 3)
    trained = TrainedLinear(CompressedLinear.of(plain))
    assert torch.equal(trained.weight, plain.weight) and torch.equal(trained.bias, plain.bias)
    weight = trained.train_weight()
    assert trained.weight is weight and dict(trained.named_parameters(recurse=False)) == {"weight": weight}
    with pytest.raises(AttributeError, match="no attribute 'wieght'"):
        _ = trained.wieght


def test_the_scales_of_all_parts_are_trained_by_factors_of_their_own():
    first, second = CodesPart.of(codes_of()), CodesPart.of(codes_of("int3", 5))
    layer = CompressedLinear.of(nn.Linear(20, 6).requires_grad_(False))
    layer.put([first, second])
    for unpacked in (False, True):
        linear, x = TrainedLinear(layer, unpacked), torch.randn(3, 20)
        factors = linear.train_scales()
        assert list(factors) == ["factor", "factor_2"]
        with torch.no_grad():
            factors["factor"][0, 0], factors["factor_2"][1, 0] = 1.5, 0.5
        parts = [
            part.with_scale(part.scale * f.detach()) for part, f in zip((first, second), factors.values(), strict=True)
        ]
        weight = sum(part.dense(torch.float32) for part in parts)
        y = linear(x)
        assert torch.allclose(y, nn.functional.linear(x, weight, layer.bias), atol=1e-4)
        y.sum().backward()
        plain = [part.dense(torch.float32) for part in (first, second)]
        for part, dense, factor in zip((first, second), plain, factors.values(), strict=True):
            assert torch.allclose(factor.grad, part.sum_groups(x.sum(0) * dense), atol=1e-4)
    after = linear.finalize(torch.float32, torch.float32)
    assert all(torch.equal(new.scale, part.scale) for new, part in zip(after.all_parts, parts, strict=True))
