"""FPTQ: the equalization by hand, what each range of inputs gets, and rounded inputs that later passes keep."""

import copy

import pytest
import torch
from draws import random
from gated import Gated, Inputs, TwoReaders
from torch import nn

import compress
from compress.layers.linear import CompressedLinear, linears
from compress.passes.contract.options import OptionError
from compress.passes.quantize.fptq import FPTQ, logarithmic

WIDTH = 6


def build(largest, kind=Gated):
    """A block of random weights whose first linears read inputs with a range of `largest` in one channel."""
    torch.manual_seed(0)
    block = kind(nn.LayerNorm(WIDTH), WIDTH, 8)
    block.norm.bias.data.zero_()
    block.norm.weight.data = torch.ones(WIDTH)
    top = block.norm(batches()[0])[..., 1].abs().max()
    block.norm.weight.data[1] = largest / top
    return block


def batches():
    return [random(3, 5, WIDTH, seed=1)]


class Sweep(Inputs):
    storage = torch.float32


def solved(block, notes, names=("a", "b"), **options):
    FPTQ(**options).solve_block(block, Sweep(block, batches(), list(names)), notes)
    return block


def test_the_equalization_by_hand():
    # 6 / log2(8), 14 / log2(16), 2 / log2(4)
    assert logarithmic(torch.tensor([6.0, 14.0, 2.0])).tolist() == [2.0, 3.5, 1.0]
    assert logarithmic(torch.tensor([0.0])).tolist() == [1.0]


def test_a_small_range_gets_a_static_scale_and_no_equalization(notes):
    before = build(14.0)
    block = solved(copy.deepcopy(before), notes)
    for name in ("a", "b"):
        layer = block.get_submodule(name)
        assert torch.equal(layer.weight, before.get_submodule(name).weight)
        assert layer.rounding.scale == pytest.approx(14.0 / 127.5, rel=1e-5)
    assert not isinstance(block.out, CompressedLinear)
    [(kind, message, figures)] = notes
    assert (kind, message) == ("note", "a, b: inputs with one static scale")
    assert figures == {"range": pytest.approx(14.0), "equalized": pytest.approx(14.0)}


def test_a_middle_range_is_equalized_first(notes):
    before = build(62.0)
    block = solved(copy.deepcopy(before), notes)
    rows = before.norm(batches()[0]).reshape(-1, WIDTH)
    absmax = rows.abs().amax(0)
    scale = absmax / torch.log2(2 + absmax)
    for name in ("a", "b"):
        layer = block.get_submodule(name)
        torch.testing.assert_close(layer.weight, before.get_submodule(name).weight * scale)
        assert layer.rounding.scale == pytest.approx(6.0 / 127.5, rel=1e-5)  # log2(2 + 62) = 6
        layer.round_inputs(None)
    torch.testing.assert_close(block(batches()[0]), before(batches()[0]), rtol=1e-4, atol=1e-4)


def test_a_large_range_gets_a_scale_per_token_and_no_equalization(notes):
    before = build(151.0)
    block = solved(copy.deepcopy(before), notes)
    for name in ("a", "b"):
        layer = block.get_submodule(name)
        assert torch.equal(layer.weight, before.get_submodule(name).weight)
        assert layer.rounding.scheme.scale == "token" and layer.rounding.scale is None
    assert notes == [
        ("note", "a, b: inputs with a scale per token", {"range": pytest.approx(151), "equalized": pytest.approx(151)})
    ]


@pytest.mark.parametrize(
    ("options", "scale"),
    [({"equalize_above": 70}, "static"), ({"dynamic_from": 61}, "token"), ({"dynamic_from": 0}, "token")],
)
def test_the_bounds_decide(notes, options, scale):
    block = solved(build(62.0), notes, **options)
    assert block.a.rounding.scheme.scale == scale
    assert torch.equal(block.a.weight, build(62.0).a.weight)


def test_an_input_that_nothing_can_equalize_gets_a_scale_per_token(notes):
    block = solved(build(62.0, TwoReaders), notes)
    assert block.a.rounding.scheme.scale == "token"
    assert [message for _, message, _ in notes] == [
        "a, b: no module before them can absorb a scale, so they are not smoothed",
        "a, b: inputs with a scale per token",
    ]
    block = solved(build(62.0, TwoReaders), notes, unlinked="scale")
    assert block.a.rounding.scale == pytest.approx(6.0 / 127.5, rel=1e-5)
    assert [t.kind for t in block.a.all_transforms] == ["scale", "rounding"]


def test_inputs_that_no_token_reached_get_a_scale_per_token(notes):
    block = build(62.0)
    FPTQ().solve_block(block, Sweep(block, [], ["a"]), notes)
    assert block.a.rounding.scheme.scale == "token"
    assert notes[0] == ("fallback", "a, b: no calibration token reached them, so they are not smoothed", {})


def test_other_readers_of_the_same_input_are_scaled_but_not_rounded(notes):
    block = solved(build(62.0), notes, names=["a"])
    assert block.a.rounding is not None and not isinstance(block.b, CompressedLinear)
    scaled = block.b.weight / build(62.0).b.weight
    assert float(scaled[:, 1].mean()) == pytest.approx(62.0 / 6, rel=1e-4)


def test_bounds_in_the_wrong_order():
    with pytest.raises(
        OptionError, match="dynamic_from 10 is below equalize_above 15; write bounds in ascending order"
    ):
        FPTQ(dynamic_from=10)


def test_a_pass_that_rounds_inputs_in_another_way_is_an_error(recipe):
    chain = recipe(FPTQ(), compress.RTN(activations="int8"))
    with pytest.raises(compress.CompressError, match="rounds the inputs in another way; leave its option activations"):
        compress.plan(chain)


def test_it_comes_before_other_rounding_and_needs_a_pass_that_rounds_weights(recipe, pico_model, pico_ids):
    assert FPTQ.never_after == {"quantized", "activations_quantized", "cache_quantized"}
    with pytest.raises(compress.CompressError, match="only rounds inputs; add a quantizing pass after it"):
        compress.apply(pico_model, [FPTQ()], pico_ids)


def test_the_chosen_rounding_stays_when_weights_are_rounded_and_saved(recipe, tmp_path):
    chain = recipe(
        FPTQ(equalize_above=3, dynamic_from=4), compress.RTN(weights="int4", group_size=16), save={"format": "native"}
    )
    folder = compress.run(chain, tmp_path / "out").folder
    found = [
        layer.scheme for layer in linears(compress.load(folder)[0]).values() if isinstance(layer, CompressedLinear)
    ]
    assert len(found) == 21 and all(scheme.codes is not None for scheme in found)
    assert {scheme.rounding.scale for scheme in found} == {"static", "token"}


def test_a_format_without_static_scales_for_these_weights_is_an_error_of_the_plan(recipe):
    int4 = compress.RTN(weights="int4", group_size=16)
    with pytest.raises(compress.CompressError, match="it may be that a static scale of the inputs is stored only with"):
        compress.plan(recipe(FPTQ(), int4))
    compress.plan(recipe(FPTQ(dynamic_from=0), int4))
    compress.plan(recipe(FPTQ(), compress.RTN(weights="int8", group_size="channel")))
