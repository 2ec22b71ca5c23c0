"""OBQ: the exact greedy order; with the columns' order it is GPTQ, and in its own order it has less error."""

from dataclasses import replace

import pytest
import torch
from draws import random

import compress
from compress.errors import NumericError, TargetError
from compress.layers.scheme import LayerScheme
from compress.numerics import column_sweep as obs
from compress.numerics.linalg import Regularization
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.observers import Gram
from compress.passes.contract.options import OptionError
from compress.passes.quantize.gptq import GPTQ
from compress.passes.quantize.obq import OBQ


def problem(rows=6, width=24, seed=0):
    """(weight, inputs, what Gram saw of them), the inputs correlated."""
    mixed = random(300, width, seed=seed) @ random(width, width, seed=seed + 1) / width**0.5
    inputs = mixed + random(300, 1, seed=seed + 2)
    seen = Gram(width, torch.device("cpu"))
    seen.update(inputs)
    return random(rows, width, seed=seed + 3), inputs, seen


def error(found, weight, inputs):
    return float(((found.dense() - weight) @ inputs.T).norm())


def test_in_the_order_of_columns_it_is_gptq(layer_of):
    weight, _, seen = problem()
    factor, _, _ = seen.factor(Regularization())
    scale = quantize(weight, GRIDS["int3"], "channel").scale

    def round_to(values, rows):
        return GRIDS["int3"].decode(GRIDS["int3"].encode(values.float(), scale[rows], None), scale[rows], None).double()

    found = obs.greedy(
        weight.double(),
        factor.double().T @ factor.double(),
        round_to,
        urgency=lambda values, rounded, rows: torch.arange(values.shape[1], 0, -1.0).expand_as(values),
    )
    swept = GPTQ(weights="int3", group_size="channel", act_order="none", scale="absmax", refine=0).codes(
        weight, seen, layer_of()
    )
    torch.testing.assert_close(found.float(), swept.dense())


def test_the_first_weight_is_the_cheapest_and_the_rest_is_made_up_for_exactly():
    weight, inputs, _ = problem(rows=1, width=5)
    hessian = inputs.double().T @ inputs.double()
    inverse, seen = torch.linalg.inv(hessian), []

    def round_to(values, rows):
        seen.append(values.clone())
        return values.round()

    found = obs.greedy(weight.double(), inverse, round_to)
    first = int(((weight.double().round() - weight) ** 2 / inverse.diagonal()).argmin())
    assert found[0, first] == weight[0, first].round()
    rest = [i for i in range(5) if i != first]
    moved = torch.linalg.solve(hessian[rest][:, rest], hessian[rest, first] * (weight[0, first] - found[0, first]))
    torch.testing.assert_close(seen[1][0, rest], weight[0, rest].double() + moved)


@pytest.mark.parametrize(("weights", "symmetric"), [("int2", True), ("int3", False), ("int4", True)])
def test_its_error_is_mostly_below_that_of_gptq(layer_of, weights, symmetric):
    ratios = []
    for seed in range(4):
        weight, inputs, seen = problem(rows=16, width=48, seed=10 * seed)
        options = {"weights": weights, "group_size": 24, "symmetric": symmetric, "scale": "absmax"}
        greedy = OBQ(**options).codes(weight, seen, layer_of())
        swept = GPTQ(refine=0, **options).codes(weight, seen, layer_of())
        ratios.append(error(greedy, weight, inputs) / error(swept, weight, inputs))
    assert sum(ratios) / 4 < 1 and sum(ratio < 1 for ratio in ratios) >= 3


@pytest.mark.parametrize("weights", ["int4", "nf4"])
def test_beside_inputs_that_are_far_larger_the_costliest_go_first(layer_of, weights):
    """As in language models: a few channels are far larger than the rest."""
    for seed in range(3):
        weight, inputs, _ = problem(rows=16, width=48, seed=10 * seed)
        inputs = inputs * torch.tensor([30.0, 10.0, 10.0, 5.0] + [1.0] * 44)
        seen = Gram(48, torch.device("cpu"))
        seen.update(inputs)
        options = {"weights": weights, "group_size": 24, "scale": "absmax"}
        cheapest, costliest = (
            error(OBQ(order=order, **options).codes(weight, seen, layer_of()), weight, inputs)
            for order in ("cheapest", "costliest")
        )
        swept = error(GPTQ(refine=0, **options).codes(weight, seen, layer_of()), weight, inputs)
        assert costliest < 0.7 * cheapest and costliest < 1.1 * swept, (costliest, cheapest, swept)


def test_the_first_weight_may_be_the_costliest():
    weight, inputs, _ = problem(rows=1, width=5)
    inverse, seen = torch.linalg.inv(inputs.double().T @ inputs.double()), []

    def round_to(values, rows):
        seen.append(values.clone())
        return values.round()

    found = obs.greedy(weight.double(), inverse, round_to, costliest=True)
    first = int(((weight.double().round() - weight) ** 2 / inverse.diagonal()).argmax())
    assert found[0, first] == weight[0, first].round() and seen[1][0, first] == found[0, first]


def test_every_kind_of_grid_is_rounded_to(layer_of):
    weight, inputs, seen = problem()
    found = OBQ(weights="fp8_e4m3", group_size=12).codes(weight, seen, layer_of())
    assert error(found, weight, inputs) < error(quantize(weight, GRIDS["fp8_e4m3"], 12), weight, inputs)


def test_chunks_of_rows_leave_no_trace(layer_of, monkeypatch):
    weight, _, seen = problem(rows=7)
    whole = OBQ(group_size=12, symmetric=False).codes(weight, seen, layer_of())
    monkeypatch.setattr(obs, "CHUNK", 2 * 24 * 24)
    parts = OBQ(group_size=12, symmetric=False).codes(weight, seen, layer_of())
    assert torch.equal(whole.codes, parts.codes)


def test_with_independent_inputs_it_is_rounding_to_nearest(layer_of):
    seen = Gram(24, torch.device("cpu"))
    seen.update(torch.eye(24))
    weight = random(5, 24)
    found = OBQ(group_size=8, scale="mse").codes(weight, seen, layer_of())
    assert torch.equal(found.codes, quantize(weight, GRIDS["int4"], 8, search="mse").codes)


@pytest.mark.parametrize("symmetric", [True, False])
def test_masked_weights_stay_exactly_zero_and_take_nothing(layer_of, symmetric):
    weight, inputs, seen = problem()
    mask = random(6, 24, seed=9) > 0
    found = OBQ(weights="int3", group_size=12, symmetric=symmetric).codes(weight, seen, layer_of(mask))
    assert (found.dense()[~mask] == 0).all()
    nearest = quantize(weight, GRIDS["int3"], 12, symmetric, mask=mask)
    assert error(found, weight * mask, inputs) < error(nearest, weight * mask, inputs)


def test_a_large_layer_is_refused_before_the_run_with_its_size_and_the_time(recipe):
    message = (
        r"passes\[0\] obq: model.layers.0.self_attn.q_proj: 128 x 128 is too large for obq.*gptq.*limit \(now 1e-09"
    )
    with pytest.raises(TargetError, match=message):
        compress.plan(recipe(OBQ(group_size=32, limit=1e-9), save={"format": "native"}))
    assert OBQ().effects(LayerScheme((128, 128))).refusal is None


def test_no_token_is_an_error_that_names_the_layer(layer_of):
    with pytest.raises(NumericError, match=r"model.layers.0.mlp.up_proj: no calibration token"):
        OBQ().codes(random(5, 24), Gram(24, torch.device("cpu")), layer_of())


@pytest.mark.parametrize("options", [{"damping": 0}, {"limit": 0}, {"symmetric": False, "weights": "nf4"}])
def test_wrong_options(options):
    with pytest.raises(OptionError):
        OBQ(**options)


def test_scales_of_either_sign_reach_further_on_one_side(layer_of):
    weight, inputs, seen = problem(rows=24)
    takes = replace(layer_of(), negative_scales=True)
    step = OBQ(weights="int3", group_size="channel", scale="mse")
    signed, positive = (step.codes(weight, seen, layer) for layer in (takes, layer_of()))
    assert (signed.scale < 0).any() and (positive.scale > 0).all()
    assert error(signed, weight, inputs) < 0.95 * error(positive, weight, inputs)
