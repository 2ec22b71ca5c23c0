"""RTN: the nearest value, from the stored scale, with the mask kept; and the options that all quantizing passes share."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from draws import random
from pydantic import ValidationError
from tolerances import LOGITS

import compress
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.codes import Percentile
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.facts import ANY_LAYER
from compress.passes.contract.observers import Nothing
from compress.passes.contract.options import OptionError
from compress.passes.quantize.rtn import RTN


def solve(rtn, weight, layer):
    return rtn.solve(weight, Nothing(weight.shape[1], torch.device("cpu")), layer)


def test_by_hand(layer_of):
    weight = torch.tensor([[7.5, -3.2, 0.4, 0.5], [-1.5, 0.7, 0.0, 0.1]])
    solution = solve(RTN(weights="int4", group_size=4), weight, layer_of())
    assert solution.weight.scale.tolist() == [[1.0], [pytest.approx(0.2)]]
    assert solution.weight.codes.tolist() == [[7, -3, 0, 0], [-8, 4, 0, 0]]  # 7.5 steps round to 8, which there is not
    assert solution.mask is None
    assert solution.transforms == ()


def by_the_conventions(weight, bits, size, symmetric):
    """(codes, scale, zero) of one group after the other in numpy: the conventions of compressed-tensors, in float32."""
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    steps, codes, scales, zeros = np.float32(highest - lowest), np.zeros_like(weight), [], []
    for start in range(0, weight.shape[1], size):
        group = weight[:, start : start + size]
        low, high = np.minimum(group.min(1, keepdims=True), 0), np.maximum(group.max(1, keepdims=True), 0)
        scale = np.maximum(-low, high) / (steps / 2) if symmetric else (high - low) / steps
        zero = np.clip(np.rint(lowest - low / scale), lowest, highest) if not symmetric else np.zeros_like(scale)
        codes[:, start : start + size] = np.clip(np.rint(group / scale + zero), lowest, highest)
        scales.append(scale)
        zeros.append(zero)
    return codes, np.concatenate(scales, 1), np.concatenate(zeros, 1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [8, 5, "channel", "tensor"])
def test_integers_are_those_of_the_conventions(layer_of, group_size, symmetric):
    """Of a whole tensor: as one row of all its weights; 5 leaves a short last group."""
    weight = random(4, 24, seed=1).numpy()
    for bits in (2, 3, 4, 8):
        rtn = RTN(weights=f"int{bits}", group_size=group_size, symmetric=symmetric)
        found = solve(rtn, torch.from_numpy(weight), layer_of()).weight
        flat = weight.reshape(1, -1) if group_size == "tensor" else weight
        size = group_size if isinstance(group_size, int) else flat.shape[1]
        codes, scale, zero = by_the_conventions(flat, bits, size, symmetric)
        assert found.codes.float().numpy().tolist() == codes.reshape(4, 24).tolist()
        assert found.scale.numpy() == pytest.approx(scale, rel=1e-6)
        assert found.zero is None if symmetric else found.zero.float().numpy().tolist() == zero.tolist()


@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_share_a_range_over_all_columns(layer_of, symmetric):
    """Q-BERT: of 7 rows in groups of 3 the last group has one row; each group is as one row of all its weights."""
    weight = random(7, 10, seed=2).numpy()
    rtn = RTN(weights="int4", group_size="channel", block_rows=3, symmetric=symmetric)
    found = solve(rtn, torch.from_numpy(weight), layer_of()).weight
    for rows in (slice(0, 3), slice(3, 6), slice(6, 7)):
        flat = weight[rows].reshape(1, -1)
        codes, scale, zero = by_the_conventions(flat, 4, flat.shape[1], symmetric)
        assert found.codes[rows].float().numpy().reshape(1, -1).tolist() == codes.tolist()
        assert found.scale[rows].numpy() == pytest.approx(scale.repeat(len(weight[rows]), 0), rel=1e-6)
        assert found.zero is None if symmetric else set(found.zero[rows].flatten().tolist()) == set(zero.flatten())
    assert rtn.effects(LayerScheme((7, 10))).scheme.text == "int4, blocks 3 x channel" and found.rows == 3


@pytest.mark.parametrize("form", ["native", "gptq"])
def test_rows_that_share_a_range_are_stored(recipe, tmp_path, form):
    """Format gptq stores the scale of each row, native the rows that share it."""
    step = compress.RTN(weights="int4", group_size="channel", block_rows=32)
    report = compress.run(recipe(step, save={"format": form}, eval=None), tmp_path / "out").report
    assert report["verified"]["own"] <= LOGITS
    codes = compress.load(tmp_path / "out")[0].model.layers[0].mlp.up_proj.codes
    assert codes.scheme.rows == (32 if form == "native" else 1)
    assert torch.equal(codes.scale[:32], codes.scale[:1].expand(32, 1)) and codes.scale[0] != codes.scale[32]


OTHER_GRIDS = {  # of the row 3, -1, 0.4, -6, each worked out by hand
    "fp8_e4m3": [3, -72 * 6 / 448, 30 * 6 / 448, -6],  # steps of 16, 8 and 2 around 224, -74.67 and 29.87
    "fp8_e5m2": [3, -10240 * 6 / 57344, 3584 * 6 / 57344, -6],  # 9557 is nearer to 10240, 3823 to 3584
    "fp4_e2m1": [3, -1, 0.5, -6],  # 0, 0.5, 1, 1.5, 2, 3, 4, 6
    "fp4_e2m1_pow2": [3, -1, 0.5, -6],
    "mxfp4": [3, -1, 0.5, -6],  # the largest, 6, gives 2^0
    "nvfp4": [3, -1, 0.5, -6],  # global 448 * 6 / 6, local 448: exactly 1
    "nf4": [6 * 0.44070982933, 6 * -0.18477343022, 6 * 0.07958029955, -6],  # QLoRA, appendix E
    "ternary": [0, 0, 0, -6],
    "binary": [6, -6, 6, -6],
}


@pytest.mark.parametrize("weights", OTHER_GRIDS)
def test_other_grids_by_hand(layer_of, weights):
    size = GRIDS[weights].group_size or 4
    row = torch.zeros(1, size).index_copy(1, torch.arange(4), torch.tensor([[3.0, -1.0, 0.4, -6.0]]))
    found = solve(RTN(weights=weights, group_size=size, scale="absmax"), row, layer_of()).weight
    assert found.dense()[0, :4].tolist() == pytest.approx(OTHER_GRIDS[weights], rel=1e-6)
    assert (found.grid, found.group_size) == (GRIDS[weights], size)


def test_a_scale_of_least_error_cuts_an_outlier(layer_of):
    weight = random(4, 64) ** 3
    largest, best = (
        solve(RTN(weights="int3", group_size=32, scale=scale), weight, layer_of()).weight for scale in ("absmax", "mse")
    )
    assert (best.scale <= largest.scale).all() and (best.scale < largest.scale).any()
    assert (best.dense() - weight).norm() < 0.95 * (largest.dense() - weight).norm()


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
    assert rtn.effects(ANY_LAYER).facts == {"quantized", "activations_quantized"}
    assert RTN().effects(ANY_LAYER).facts == {"quantized"}
    assert rtn.effects(LayerScheme((8, 64))).scheme.rounding.grid is GRIDS["int8"]
    assert not rtn.effects(LayerScheme((8, 64))).scheme.codes.indexed


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
            "scale 'median' is not known; write absmax, absmean, mse, importance, percentile, or {percentile: 0.999}",
        ),
        ({"scale": {"percentile": 0.9, "steps": 3}}, "scale .* is not known"),
        ({"scale": {"percentile": 99.9}}, "percentile 99.9 must be a fraction above 0.5 and at most 1, such as 0.999"),
        (
            {"weights": "mxfp4", "group_size": 64},
            "group_size 64: mxfp4 has one scale for 32 columns; write 32",
        ),
        (
            {"weights": "nvfp4", "group_size": "channel"},
            "group_size channel: nvfp4 has one scale for 16 columns",
        ),
        ({"activations": "int3"}, "input should be 'none', 'int8', 'fp8_e4m3', 'int4', 'mxfp4', 'nvfp4' or 'mxfp8'"),
        ({"bits": 4}, "unknown option"),
        ({"targets": "re:("}, "'re:\\(' is not a regular expression"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(OptionError, match=message):
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
