"""SmoothQuant: equation 4 by hand, folds that leave a block as it was, and folds that cannot, which are undone."""

import copy

import pytest
import torch
from draws import random
from gated import Gated, Inputs, TwoReaders
from torch import nn

import compress
from compress.layers.linear import CompressedLinear, linears
from compress.layers.transforms.rounding import InputRounding
from compress.models.structure.links import Link, find_links
from compress.passes.contract.options import OptionError
from compress.passes.families.equalizing import SMALLEST, smoothing, weight_absmax
from compress.passes.prepare.smoothquant import SEARCHED, SmoothQuant, rounded_error

WIDTH = 6
OUTLIERS = torch.tensor([1.0, 40.0, 1.0, 0.1, 1.0, 8.0])


class OnePlus(nn.Module):
    """A norm that multiplies by 1 + weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def build(norm, kind=Gated):
    """A block of random weights whose norm writes outliers."""
    torch.manual_seed(0)
    block = kind(norm, WIDTH, 8)
    block.norm.weight.data = OUTLIERS.clone() if not isinstance(norm, OnePlus) else OUTLIERS - 1
    return block


@pytest.fixture
def batches():
    return [random(3, 5, WIDTH, seed=1), random(2, 7, WIDTH, seed=2)]


def input_absmax(block, batches):
    return torch.cat([block.norm(x).reshape(-1, WIDTH) for x in batches]).abs().amax(0)


def test_equation_4_by_hand():
    inputs, weights = torch.tensor([16.0, 1.0, 9.0]), torch.tensor([1.0, 0.25, 4.0])
    assert smoothing(inputs, weights, 0.5).tolist() == [4.0, 2.0, 1.5]
    assert smoothing(inputs, weights, 1).tolist() == [16.0, 1.0, 9.0]
    assert smoothing(inputs, weights, 0).tolist() == [1.0, 4.0, 0.25]
    torch.testing.assert_close(smoothing(inputs, weights, 0.75), torch.tensor([8.0, 2**0.5, 27**0.5 / 2**0.5]))


def test_a_channel_that_was_always_zero_keeps_its_scale():
    scale = smoothing(torch.tensor([0.0, 4.0]), torch.tensor([1.0, 1.0]), 0.5)
    assert scale.tolist() == [1.0, 2.0]


def test_weights_and_scales_are_kept_away_from_zero():
    assert smoothing(torch.tensor([4.0]), torch.tensor([0.0]), 0.5) == pytest.approx(2 / SMALLEST**0.5)
    assert smoothing(torch.tensor([1e-30]), torch.tensor([1.0]), 0.5) == pytest.approx(SMALLEST)


def test_the_weight_maximum_is_over_all_linears_of_a_group():
    block = build(nn.LayerNorm(WIDTH))
    link, *_ = find_links(block, lambda module: module(random(1, 2, WIDTH)))
    assert link.readers == ("a", "b")
    found = weight_absmax(block, link.readers)
    assert torch.equal(found, torch.maximum(block.a.weight.abs().amax(0), block.b.weight.abs().amax(0)))


@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), OnePlus()], ids=["layer", "rms", "one plus"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_the_block_computes_what_it_did_and_the_scales_have_moved(batches, notes, norm, alpha):
    block = build(norm)
    before = copy.deepcopy(block)
    inputs, weights = input_absmax(block, batches), torch.cat([block.a.weight, block.b.weight]).abs().amax(0)
    SmoothQuant(alpha=alpha).solve_block(block, Inputs(block, batches, ["a", "b"]), notes)
    assert notes == []
    for x in batches:
        torch.testing.assert_close(block(x), before(x), rtol=1e-4, atol=1e-4)
    s = inputs**alpha / weights ** (1 - alpha)
    torch.testing.assert_close(block.a.weight, before.a.weight * s)
    torch.testing.assert_close(block.b.weight, before.b.weight * s)
    torch.testing.assert_close(input_absmax(block, batches), inputs / s, rtol=1e-4, atol=1e-5)
    assert torch.equal(block.out.weight, before.out.weight)


def test_alpha_1_makes_all_inputs_equal_and_alpha_0_all_weights(batches, notes):
    block = build(nn.LayerNorm(WIDTH))
    SmoothQuant(alpha=1).solve_block(block, Inputs(block, batches, ["a"]), notes)
    torch.testing.assert_close(input_absmax(block, batches), torch.ones(WIDTH))
    block = build(nn.LayerNorm(WIDTH))
    SmoothQuant(alpha=0).solve_block(block, Inputs(block, batches, ["a"]), notes)
    torch.testing.assert_close(torch.cat([block.a.weight, block.b.weight]).abs().amax(0), torch.ones(WIDTH))


def test_at_one_half_inputs_and_weights_end_with_the_same_range(batches, notes):
    block = build(nn.RMSNorm(WIDTH))
    SmoothQuant(alpha=0.5).solve_block(block, Inputs(block, batches, ["a"]), notes)
    weights = torch.cat([block.a.weight, block.b.weight]).abs().amax(0)
    torch.testing.assert_close(input_absmax(block, batches), weights, rtol=1e-4, atol=1e-5)


def test_linears_that_no_link_reaches_are_left_alone_and_noted(batches, notes):
    block = build(nn.LayerNorm(WIDTH), TwoReaders)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    SmoothQuant().solve_block(block, Inputs(block, batches, ["a"]), notes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
    assert notes == [("note", "a, b: no module before them can absorb a scale, so they are not smoothed", {})]


def test_a_fold_that_would_change_the_output_is_undone_and_noted(batches, notes):
    block = build(nn.LayerNorm(WIDTH), TwoReaders)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    inputs = Inputs(block, batches, ["a"])
    inputs.links = [Link("norm", ("a", "b"), torch.arange(WIDTH), "norm")]  # which find_links would not give
    SmoothQuant().solve_block(block, inputs, notes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
    [(kind, message, figures)] = notes
    assert kind == "fallback"
    assert message == "a, b: folding the scale into norm changed the block's output, so it was undone"
    assert figures["relative_error"] > 0.01


def test_a_scale_moves_through_a_linear_where_no_norm_feeds(batches, notes):
    block = build(nn.LayerNorm(WIDTH))
    before = copy.deepcopy(block)
    SmoothQuant().solve_block(block, Inputs(block, batches, ["out"]), notes)
    assert notes == []
    h = [before.norm(x) for x in batches]
    inputs = torch.cat([(torch.tanh(before.a(x)) * before.b(x)).reshape(-1, 8) for x in h]).abs().amax(0)
    s = (inputs / before.out.weight.abs().amax(0)) ** 0.5
    torch.testing.assert_close(block.out.weight, before.out.weight * s)
    torch.testing.assert_close(block.b.weight, before.b.weight / s[:, None])
    assert torch.equal(block.a.weight, before.a.weight) and torch.equal(block.norm.weight, before.norm.weight)
    for x in batches:
        torch.testing.assert_close(block(x), before(x), rtol=1e-4, atol=1e-4)


def test_linears_that_no_token_reached_are_left_alone_and_noted(notes):
    block = build(nn.LayerNorm(WIDTH))
    before = copy.deepcopy(block)
    SmoothQuant().solve_block(block, Inputs(block, [], ["a"]), notes)
    assert all(
        torch.equal(a, b) for a, b in zip(block.state_dict().values(), before.state_dict().values(), strict=True)
    )
    assert notes == [("fallback", "a, b: no calibration token reached them, so they are not smoothed", {})]


def test_masks_stay_on_smoothed_layers(batches, notes):
    block = build(nn.LayerNorm(WIDTH))
    mask = random(8, WIDTH, seed=4) > 0
    block.a = CompressedLinear.of(block.a)
    block.a.put(block.a.weight * mask, mask)
    assert set(linears(block)) == {"a", "b", "out"}
    before = [block(x) for x in batches]
    SmoothQuant().solve_block(block, Inputs(block, batches, ["a"]), notes)
    assert torch.equal(block.a.mask, mask)
    assert (block.a.weight[~mask] == 0).all()
    for x, y in zip(batches, before, strict=True):
        torch.testing.assert_close(block(x), y, rtol=1e-4, atol=1e-4)


def test_smoothing_makes_rounded_activations_less_wrong(batches, notes):
    from compress.numerics.quant.codes import quantize
    from compress.numerics.quant.grids import GRIDS

    def quantized_error(block):
        wanted = [block(x) for x in batches]
        rounded = copy.deepcopy(block)
        for name in ("a", "b"):
            layer = CompressedLinear.of(rounded.get_submodule(name))
            layer.put(quantize(layer.weight, GRIDS["int8"], "channel"))
            layer.round_inputs(InputRounding.of(GRIDS["int8"]))
            setattr(rounded, name, layer)
        return sum(float((rounded(x) - y).norm()) for x, y in zip(batches, wanted, strict=True))

    block = build(nn.LayerNorm(WIDTH))
    plain = quantized_error(block)
    SmoothQuant().solve_block(block, Inputs(block, batches, ["a"]), notes)
    assert quantized_error(block) < 0.9 * plain


def test_the_search_takes_the_alpha_with_the_least_error(batches, notes):
    block = build(nn.LayerNorm(WIDTH))
    before = copy.deepcopy(block)
    SmoothQuant(alpha="search").solve_block(block, Inputs(block, batches, ["a", "b"]), notes)
    [(kind, message, figures)] = notes
    assert kind == "note" and message == "a, b: the best of 22 scales"
    rows = torch.cat([before.norm(x).reshape(-1, WIDTH) for x in batches])
    absmax, weights = rows.abs().amax(0), torch.cat([before.a.weight, before.b.weight]).abs().amax(0)

    def error(alpha):
        scale = smoothing(absmax, weights, alpha)
        return sum(rounded_error(rows, w, scale, rows @ w.T) for w in (before.a.weight, before.b.weight))

    assert figures["alpha"] == min(SEARCHED, key=error)
    assert figures["error"] == pytest.approx(error(figures["alpha"]) ** 0.5)
    assert figures["error"] < figures["unsmoothed"]
    torch.testing.assert_close(block.a.weight, before.a.weight * smoothing(absmax, weights, figures["alpha"]))
    for x in batches:
        torch.testing.assert_close(block(x), before(x), rtol=1e-4, atol=1e-4)


def test_w8a8_rounding_by_hand():
    rows, weight = torch.tensor([[127.5, 3.4]]), torch.tensor([[127.5, 1.6]])
    # The step is 1 in both: 127 * 127 + 3 * 2 instead of 127.5 * 127.5 + 3.4 * 1.6.
    wanted = rows @ weight.T
    found = rounded_error(rows, weight, torch.ones(2), wanted)
    assert found == pytest.approx((127**2 + 6 - 127.5**2 - 5.44) ** 2 / (127.5**2 + 5.44) ** 2, rel=1e-3)


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_alpha_is_a_share(alpha):
    with pytest.raises(OptionError, match="than or equal to"):
        SmoothQuant(alpha=alpha)


def test_it_comes_before_anything_is_quantized():
    assert SmoothQuant.never_after == {"quantized", "cache_quantized"}


def test_smoothing_that_no_rounding_follows_is_an_error(recipe, pico_model, pico_ids):
    message = r"passes\[0\] smoothquant: only rescales channels; add a quantizing pass after it"
    with pytest.raises(compress.CompressError, match=message):
        compress.apply(pico_model, [SmoothQuant()], pico_ids)
    with pytest.raises(compress.CompressError, match=message):
        recipe(SmoothQuant(), compress.Wanda())
    with pytest.raises(compress.CompressError, match=r"smoothquant: .*o_proj: only rescales channels"):
        compress.plan(recipe(SmoothQuant(), compress.RTN(ignore="*.o_proj")))
