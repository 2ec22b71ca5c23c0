"""HQQ: never worse than its start, exact where a weight lies on a grid, zero points whole or any number, the mask kept."""

import json
from dataclasses import replace

import pytest
import torch
from draws import random
from tolerances import LOGITS

import compress
from compress.errors import TargetError
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.options import OptionError
from compress.passes.quantize.hqq import HQQ, shrink


def error(found, weight, size=16):
    return (found.dense() - weight).abs().reshape(weight.shape[0], -1, size).sum(-1)


def test_the_soft_threshold_by_hand():
    # p = 1 is the usual soft threshold; p = 0.5: |e| - |e|^(-1/2) / beta
    torch.testing.assert_close(shrink(torch.tensor([3.0, -0.4, 0.0]), 2.0, 1.0), torch.tensor([2.5, -0.0, 0.0]))
    torch.testing.assert_close(shrink(torch.tensor([4.0, -0.25]), 1.0, 0.5), torch.tensor([3.5, -0.0]))


@pytest.mark.parametrize("weights", ["int2", "int3", "int4", "int8"])
@pytest.mark.parametrize("optimize", ["zero", "scale", "both"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_no_group_is_worse_than_rounding_to_nearest(layer_of, weights, optimize, symmetric):
    weight = random(8, 64) + 0.3
    options = {"weights": weights, "group_size": 16, "symmetric": symmetric, "optimize": optimize}
    found = HQQ(**options).codes(weight, None, layer_of())
    nearest = quantize(weight, GRIDS[weights], 16, symmetric)
    assert (error(found, weight) <= error(nearest, weight) * (1 + 1e-6)).all()


@pytest.mark.parametrize("weights", ["int3", "int4", "nf4", "fp4_e2m1"])
def test_on_the_whole_it_is_better(layer_of, weights):
    weight = random(32, 256)
    symmetric = weights in ("nf4", "fp4_e2m1")
    found = HQQ(weights=weights, group_size=32, symmetric=symmetric).codes(weight, None, layer_of())
    nearest = quantize(weight, GRIDS[weights], 32, symmetric)
    assert (found.dense() - weight).norm() < 0.98 * (nearest.dense() - weight).norm()


def test_a_weight_that_lies_on_a_grid_is_found_exactly(layer_of):
    # Steps of 0.25, an outlier between two of them: the range is not a whole number of steps.
    codes = torch.randint(-8, 8, (16, 32), generator=torch.Generator().manual_seed(0))
    codes[:, 0], codes[:, 1] = -8, 7
    weight = (codes + 3) * 0.25
    weight[:, 1] += 0.06
    found = HQQ(weights="int4", group_size=32).codes(weight, None, layer_of())
    nearest = quantize(weight, GRIDS["int4"], 32, symmetric=False)
    rest = torch.arange(32) != 1
    assert (found.dense() - weight)[:, rest].abs().mean() < 0.3 * (nearest.dense() - weight)[:, rest].abs().mean()


def test_zero_points_are_whole_numbers_that_codes_can_have(layer_of):
    found = HQQ(weights="int3", group_size=16).codes(random(8, 64) + 2, None, layer_of())
    assert torch.equal(found.zero, found.zero.round())
    assert found.zero.min() >= -4 and found.zero.max() <= 3


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16], ids=str)
def test_a_zero_point_that_is_any_number_is_found_by_least_squares(layer_of, storage):
    # Steps of 0.5 that start at 0.3: with so small a beta all errors are thresholded away, and one step finds them.
    codes = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0))
    codes[:, ::16], codes[:, 1::16] = 0, 15
    weight = codes * 0.5 - 3.7
    exact = HQQ(weights="int4", group_size=16, zero_point="float", beta=1e-6)
    found = exact.codes(weight, None, layer_of(storage=storage))
    assert found.float_zeros and torch.equal(found.zero.to(storage).float(), found.zero)
    assert not torch.equal(found.zero, found.zero.round())
    assert (found.dense() - weight).abs().max() < (1e-5 if storage == torch.float32 else 0.02)
    whole = HQQ(weights="int4", group_size=16, beta=1e-6).codes(weight, None, layer_of(storage=storage))
    assert (whole.dense() - weight).abs().max() > 0.05


def test_pruned_weights_stay_zero_also_where_zero_points_are_any_number(layer_of, notes):
    weight, mask = random(8, 64), random(8, 64, seed=1) > 0
    found = HQQ(group_size=16, zero_point="float").codes(weight, None, layer_of(mask))
    assert not found.float_zeros and (found.dense()[~mask] == 0).all()
    assert [(kind, message) for kind, message, _ in notes] == [
        ("fallback", "pruned weights must be exactly zero, so zero points of this layer are whole numbers")
    ]


def test_zero_points_in_floats_are_stored_planned_and_read(recipe, tmp_path):
    step = HQQ(group_size=32, zero_point="float")
    report = compress.run(recipe(step, save={"format": "native"}), tmp_path).report
    assert report["verified"]["own"] <= LOGITS
    assert report["size"]["tensor_bytes"] == report["predicted"]["tensor_bytes"]
    layer = compress.load(tmp_path)[0].get_submodule("model.layers.1.mlp.up_proj")
    assert layer.codes.zero.is_floating_point() and layer.scheme.codes.float_zeros
    layers = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["layers"]
    assert layers["model.layers.1.mlp.up_proj"]["parts"][0]["float_zeros"]


def test_a_format_with_whole_zero_points_refuses_others(recipe, tmp_path):
    with pytest.raises(TargetError, match="are integers; use zero_point: integer, or format: native"):
        compress.run(recipe(HQQ(group_size=32, zero_point="float")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_original_form_leaves_the_scale_alone(layer_of):
    weight = random(8, 64) + 0.3
    found = HQQ(weights="int3", group_size=16, optimize="zero").codes(weight, None, layer_of())
    assert torch.equal(found.scale, quantize(weight, GRIDS["int3"], 16, False).scale)


@pytest.mark.parametrize("group_size", [16, 24, "channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_masked_weights_stay_exactly_zero_and_do_not_count(layer_of, group_size, symmetric):
    weight, mask = random(8, 64), random(8, 64, seed=1) > 0
    hqq = HQQ(weights="int3", group_size=group_size, symmetric=symmetric)
    found = hqq.codes(weight, None, layer_of(mask))
    assert (found.dense()[~mask] == 0).all()
    assert torch.equal(found.codes, hqq.codes(weight * mask, None, layer_of(mask)).codes)


def test_a_short_last_group_is_that_of_its_columns_alone(layer_of):
    weight = random(8, 40) + 0.2
    whole = HQQ(weights="int4", group_size=32).codes(weight, None, layer_of())
    last = HQQ(weights="int4", group_size="channel").codes(weight[:, 32:], None, layer_of())
    assert torch.equal(whole.codes[:, 32:], last.codes)
    torch.testing.assert_close(whole.scale[:, 1:], last.scale)


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
def test_scales_are_in_the_storage_dtype(layer_of, storage):
    found = HQQ(group_size=16).codes(random(8, 64), None, layer_of(storage=storage))
    assert torch.equal(found.scale.to(storage).float(), found.scale)


def test_a_weight_of_zeros_stays_so(layer_of):
    assert (HQQ(group_size=16).codes(torch.zeros(2, 32), None, layer_of()).dense() == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": 0}, "greater than 0"),
        ({"norm": 1.5}, "less than or equal to 1"),
        ({"beta": 0}, "greater than 0"),
        ({"kappa": 0.9}, "greater than or equal to 1"),
        ({"iterations": 0}, "greater than or equal to 1"),
        ({"symmetric": True, "zero_point": "float"}, "zero_point has no effect without zero points"),
        ({"weights": "nf4"}, "symmetric: false needs an integer grid; nf4 has no zero point"),
        (
            {"weights": "nf4_dq", "symmetric": True},
            "nf4_dq has scales that are not plain floats, but hqq finds float scales; use the pass rtn",
        ),
        ({"weights": "mxfp4", "symmetric": True}, "mxfp4 has scales that are not plain floats"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(OptionError, match=message):
        HQQ(**options)


def test_without_zero_points_scales_of_either_sign_are_kept_through_the_refinement(layer_of):
    weight = random(32, 64)
    step = HQQ(weights="int3", group_size=16, symmetric=True, scale="mse")
    signed, positive = (step.codes(weight, None, replace(layer_of(), negative_scales=takes)) for takes in (True, False))
    assert (signed.scale < 0).any() and (positive.scale > 0).all()
    assert (signed.dense() - weight).norm() < 0.97 * (positive.dense() - weight).norm()
