"""RTN: the nearest value, from the stored scale, with the mask kept; and the options that all quantizing passes share."""

import pytest
import torch
from pydantic import ValidationError

from compress.numerics.codes import quantize
from compress.numerics.grids import GRIDS
from compress.passes.rtn import RTN
from compress.stream.observers import Nothing


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def solve(rtn, weight, layer):
    return rtn.solve(weight, Nothing(weight.shape[1], torch.device("cpu")), layer)


def test_by_hand(layer_of):
    weight = torch.tensor([[7.5, -3.2, 0.4, 0.5], [-1.5, 0.7, 0.0, 0.1]])
    solution = solve(RTN(weights="int4", group_size=4), weight, layer_of())
    assert solution.weight.scale.tolist() == [[1.0], [pytest.approx(0.2)]]
    assert solution.weight.codes.tolist() == [[7, -3, 0, 0], [-8, 4, 0, 0]]  # 7.5 steps round to 8, which there is not
    assert solution.mask is None
    assert solution.activations is None


@pytest.mark.parametrize("weights", GRIDS)
@pytest.mark.parametrize("group_size", [8, 5, "channel", "tensor"])
@pytest.mark.parametrize("scale", ["absmax", "mse"])
def test_every_option_reaches_the_codes(layer_of, weights, group_size, scale):
    weight = random(4, 24)
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
    assert solve(rtn, random(4, 8), layer_of()).activations.grid is GRIDS["int8"]
    assert rtn.facts() == {"quantized", "activations_quantized"}
    assert RTN().facts() == {"quantized"}
    assert rtn.spec.activations is GRIDS["int8"]
    assert not rtn.spec.indexed


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
        ({"scale": "median"}, "Input should be 'absmax' or 'mse'"),
        ({"activations": "int4"}, "Input should be 'none', 'int8' or 'fp8_e4m3'"),
        ({"bits": 4}, "Extra inputs are not permitted"),
        ({"targets": "re:("}, "'re:\\(' is no regular expression"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(ValidationError, match=message):
        RTN(**options)


def test_a_pass_is_a_frozen_value():
    rtn = RTN(weights="int8")
    assert rtn == RTN(weights="int8") != RTN(weights="int4")
    with pytest.raises(ValidationError, match="frozen"):
        rtn.weights = "int4"
