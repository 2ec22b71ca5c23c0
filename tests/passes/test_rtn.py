"""RTN: the nearest value, from the stored scale, with the mask kept; and the options that all quantizing passes share."""

from dataclasses import replace

import pytest
import torch
from draws import random
from pydantic import ValidationError

from compress.api.observers import Nothing
from compress.numerics.quant.codes import Percentile, quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.rtn import RTN
from compress.weights.layer import LayerScheme


def solve(rtn, weight, layer):
    return rtn.solve(weight, Nothing(weight.shape[1], torch.device("cpu")), layer)


def test_by_hand(layer_of):
    weight = torch.tensor([[7.5, -3.2, 0.4, 0.5], [-1.5, 0.7, 0.0, 0.1]])
    solution = solve(RTN(weights="int4", group_size=4), weight, layer_of())
    assert solution.weight.scale.tolist() == [[1.0], [pytest.approx(0.2)]]
    assert solution.weight.codes.tolist() == [[7, -3, 0, 0], [-8, 4, 0, 0]]  # 7.5 steps round to 8, which there is not
    assert solution.mask is None
    assert solution.transforms == ()


@pytest.mark.parametrize("weights", GRIDS)
@pytest.mark.parametrize("group_size", [8, 5, "channel", "tensor"])
@pytest.mark.parametrize("scale", ["absmax", "mse"])
def test_every_option_reaches_the_codes(layer_of, weights, group_size, scale):
    weight, own = random(4, 24), GRIDS[weights].group_size
    group_size = own or group_size
    found = solve(RTN(weights=weights, group_size=group_size, scale=scale), weight, layer_of()).weight
    wanted = quantize(weight, GRIDS[weights], group_size, True, scale)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scale, wanted.scale)
    assert (found.grid, found.group_size) == (GRIDS[weights], group_size)


def test_asymmetric_codes_have_a_zero_point_and_less_error_on_shifted_weights(layer_of):
    weight = random(8, 64) + 2
    plain, shifted = (
        solve(RTN(weights="int4", group_size=16, symmetric=symmetric), weight, layer_of()).weight
        for symmetric in (True, False)
    )
    assert plain.zero is None
    assert shifted.zero.shape == (8, 4)
    assert (shifted.dense() - weight).norm() < 0.7 * (plain.dense() - weight).norm()


@pytest.mark.parametrize("symmetric", [True, False])
def test_masked_weights_stay_exactly_zero(layer_of, symmetric):
    weight, mask = random(8, 20), random(8, 20, seed=1) > 0
    found = solve(RTN(weights="int3", group_size=8, symmetric=symmetric), weight * mask, layer_of(mask)).weight
    assert (found.dense()[~mask] == 0).all()


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
def test_scales_are_in_the_storage_dtype(layer_of, storage):
    found = solve(RTN(), random(4, 128), layer_of(storage=storage)).weight
    assert torch.equal(found.scale.to(storage).float(), found.scale)


def test_the_grid_of_the_inputs_goes_along(layer_of):
    rtn = RTN(weights="int8", group_size="channel", activations="int8")
    [rounding] = solve(rtn, random(4, 8), layer_of()).transforms
    assert rounding.grid is GRIDS["int8"]
    assert rtn.facts() == {"quantized", "activations_quantized"}
    assert RTN().facts() == {"quantized"}
    assert rtn.becomes(LayerScheme((8, 64))).rounding.grid is GRIDS["int8"]
    assert not rtn.becomes(LayerScheme((8, 64))).codes.indexed


def test_a_grid_may_be_given_itself():
    assert RTN(weights=GRIDS["nf4"]).weights == "nf4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int9"}, "grid 'int9' is not known; known: int2, int3"),
        ({"group_size": 0}, "group_size 0 must be a positive number of columns, channel, or tensor"),
        ({"group_size": -1}, "group_size -1 must be a positive"),
        ({"group_size": True}, "group_size True must be a positive"),
        ({"group_size": "row"}, "group_size 'row' must be a positive"),
        ({"weights": "nf4", "symmetric": False}, "symmetric: false needs an integer grid; nf4 has no zero point"),
        (
            {"scale": "median"},
            "scale 'median' is not known; write absmax, absmean, mse, percentile, or {percentile: 0.999}",
        ),
        ({"scale": {"percentile": 0.9, "steps": 3}}, "scale .* is not known"),
        ({"scale": {"percentile": 99.9}}, "percentile 99.9 must be a share above 0.5 and at most 1, such as 0.999"),
        (
            {"weights": "mxfp4", "group_size": 64},
            "group_size 64: the scales of mxfp4 are those of 32 columns; write 32",
        ),
        (
            {"weights": "nvfp4", "group_size": "channel"},
            "group_size channel: the scales of nvfp4 are those of 16 columns",
        ),
        ({"activations": "int4"}, "Input should be 'none', 'int8' or 'fp8_e4m3'"),
        ({"bits": 4}, "Extra inputs are not permitted"),
        ({"targets": "re:("}, "'re:\\(' is no regular expression"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(ValidationError, match=message):
        RTN(**options)


@pytest.mark.parametrize(("weights", "size"), [("mxfp4", 32), ("nvfp4", 16), ("int4", 64), (GRIDS["mxfp4"], 32)])
def test_a_grid_with_a_group_size_of_its_own_is_given_it(weights, size):
    assert RTN(weights=weights).group_size == size
    assert RTN(weights=weights, group_size=size) == RTN(weights=weights)


def test_a_percentile_is_spelled_by_its_name_or_with_its_share(layer_of):
    assert RTN(scale="percentile").scale == Percentile(percentile=0.999)
    rtn = RTN(weights="int4", group_size="channel", scale={"percentile": 0.9})
    assert RTN.model_validate(rtn.model_dump(mode="json")) == rtn
    weight = random(4, 100)
    found = solve(rtn, weight, layer_of()).weight
    assert torch.equal(found.scale[:, 0], weight.abs().sort(dim=1).values[:, 89] / 7.5)


def test_the_largest_weight_beside_it_sets_the_global_scale(layer_of):
    found = solve(RTN(weights="nvfp4"), random(4, 32), replace(layer_of(), shared_absmax=10.0)).weight
    assert found.shared.tolist() == [pytest.approx(268.8)]


def test_a_pass_is_a_frozen_value():
    rtn = RTN(weights="int8")
    assert rtn == RTN(weights="int8") != RTN(weights="int4")
    with pytest.raises(ValidationError, match="frozen"):
        rtn.weights = "int4"
