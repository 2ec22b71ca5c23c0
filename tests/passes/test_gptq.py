"""GPTQ: codes that are what the sweep made, less output error than rounding, and every order of columns."""

from dataclasses import replace

import pytest
import torch
from draws import correlated, random, seen_of

from compress.errors import NumericError
from compress.layers.parts.codes import CodesPart
from compress.layers.scheme import LayerScheme
from compress.numerics.column_sweep import sweep
from compress.numerics.quant import rounding
from compress.numerics.quant.codes import fit, quantize, spread
from compress.numerics.quant.grids import GRIDS, Grid
from compress.passes.contract.layers import Solution
from compress.passes.contract.observers import CrossGram, Gram
from compress.passes.contract.options import OptionError
from compress.passes.prune.sparsegpt import SparseGPT
from compress.passes.quantize.gptq import GPTQ
from compress.passes.quantize.hqq import HQQ
from compress.passes.quantize.obq import OBQ
from compress.passes.quantize.rtn import RTN
from compress.passes.quantize.signround import SignRound

WIDTH = 40
ORDERS = ["none", "static", "group"]
SIZES = [12, 16, 64, "channel", "tensor"]  # 16 leaves a short last group of 36 columns, 64 is larger than all of them


def plain(**options):
    """GPTQ as in its paper, unless options are given: what the tests of the sweep look at."""
    paper = {"act_order": "none", "scale": "absmax", "refine": 0, "normalize_tokens": False, "shrinkage": 0}
    return GPTQ(**{**paper, **options})


def combinations():
    return [(o, s) for o in ORDERS for s in SIZES if o != "group" or isinstance(s, int)]


def width_of(weights):
    """The width of a weight: super-blocks have 256 columns."""
    return WIDTH if GRIDS[weights].block == 1 else 256


def error(found, weight, rows):
    return float(((found.dense() - weight) @ rows.T).norm())


@pytest.mark.parametrize(("order", "group_size"), combinations())
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_codes_decode_to_what_the_sweep_made(monkeypatch, layer_of, notes, order, group_size, symmetric):
    made = []
    original = rounding.sweep
    monkeypatch.setattr(rounding, "sweep", lambda *args: made.append(original(*args)) or made[-1])
    rows, weight = correlated(), random(7, WIDTH, seed=3)
    found = plain(weights="int4", group_size=group_size, act_order=order, symmetric=symmetric).codes(
        weight, seen_of(rows), layer_of()
    )
    swept = made[0]
    if order != "none":
        columns = seen_of(rows).hessian.diagonal().argsort(descending=True, stable=True)
        swept = torch.empty_like(swept).index_copy_(1, columns, swept)
    assert torch.equal(found.dense(), swept)
    assert (found.zero is None) == symmetric
    assert (found.group_index is None) == (order != "group")
    assert notes == []


@pytest.mark.parametrize(("order", "group_size"), combinations())
@pytest.mark.parametrize("weights", ["int3", "nf4", "fp4_e2m1", "fp8_e4m3"])
def test_the_output_error_is_less_than_that_of_rounding(layer_of, order, group_size, weights):
    rows, weight = correlated(seed=5), random(16, WIDTH, seed=4)
    found = plain(weights=weights, group_size=group_size, act_order=order).codes(weight, seen_of(rows), layer_of())
    nearest = quantize(weight, GRIDS[weights], group_size)
    assert error(found, weight, rows) < 0.8 * error(nearest, weight, rows)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "weights", [n for n, grid in GRIDS.items() if grid.scaling.stored is not None and grid.run == 1]
)
def test_stored_scales_are_fitted_group_by_group_and_read_back(monkeypatch, layer_of, order, weights):
    made = []
    original = rounding.sweep
    monkeypatch.setattr(rounding, "sweep", lambda *args: made.append(original(*args)) or made[-1])
    grid, width = GRIDS[weights], width_of(weights)
    rows, weight = correlated(seed=5, width=width), random(16, width, seed=4)
    size = grid.group_size or 8
    found = plain(weights=weights, group_size=size, act_order=order).codes(weight, seen_of(rows), layer_of())
    swept = made[0]
    if order != "none":
        columns = seen_of(rows).hessian.diagonal().argsort(descending=True, stable=True)
        swept = torch.empty_like(swept).index_copy_(1, columns, swept)
    assert torch.equal(found.dense(), swept)
    back = CodesPart.of(found).codes()
    assert torch.equal(back.scale, found.scale)
    assert torch.equal(back.dense(), found.dense())
    assert error(found, weight, rows) < 0.9 * error(quantize(weight, grid, size, not grid.offset), weight, rows)


@pytest.mark.parametrize("weights", [name for name, grid in GRIDS.items() if grid.run == 1])
def test_with_independent_inputs_every_grid_is_rounded_to_nearest(layer_of, weights):
    grid, width = GRIDS[weights], width_of(weights)
    weight, size = random(5, width, seed=6), grid.group_size or 12
    found = plain(weights=weights, group_size=size).codes(weight, seen_of(torch.eye(width)), layer_of())
    wanted = quantize(weight, grid, size, not grid.offset, plain(weights=weights).scale)
    torch.testing.assert_close(found.scale, wanted.scale, rtol=1e-6, atol=0)  # means are summed in another order
    assert torch.equal(found.codes, wanted.codes)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("weights", ["int3", "int4_signed", "uint4", "uint4_k", "int3_k"])
def test_scales_of_least_weighted_error_give_a_smaller_error_of_the_output(layer_of, order, weights):
    width = width_of(weights) if weights.endswith("_k") else 64
    rows, weight = correlated(seed=5, width=width), random(64, width, seed=4) ** 3
    size = GRIDS[weights].group_size or 16
    found = {
        scale: plain(weights=weights, group_size=size, act_order=order, scale=scale).codes(
            weight, seen_of(rows), layer_of()
        )
        for scale in ("absmax", "mse", "importance")
    }
    assert error(found["importance"], weight, rows) < 0.95 * error(found["absmax"], weight, rows)
    assert error(found["importance"], weight, rows) < 1.02 * error(found["mse"], weight, rows)


@pytest.mark.parametrize("order", ["none", "static"])
@pytest.mark.parametrize("weights", [name for name, grid in GRIDS.items() if grid.run > 1])
def test_runs_of_a_codebook_lose_less_than_rounding_and_each_refinement_lowers_the_error(layer_of, order, weights):
    width = width_of(weights)
    rows, weight = correlated(seed=5, width=width), random(12, width, seed=4)
    made = [
        GPTQ(weights=weights, act_order=order, refine=rounds, normalize_tokens=False).codes(
            weight, seen_of(rows), layer_of()
        )
        for rounds in (0, 1, 2)
    ]
    swept, once, twice = (error(codes, weight, rows) for codes in made)
    assert (
        twice < once < swept < 0.8 * error(quantize(weight, GRIDS[weights], search="mse", group_size=32), weight, rows)
    )
    for codes in made:
        back = CodesPart.of(codes).codes()
        assert torch.equal(back.dense(), codes.dense()) and torch.equal(back.scale, codes.scale)


def test_codebooks_need_passes_that_choose_runs():
    with pytest.raises(
        OptionError, match="weights: iq3_s takes 8 columns together from a codebook, and obq rounds col"
    ):
        OBQ(weights="iq3_s")
    with pytest.raises(OptionError, match="act_order: group separates the columns that iq2_xs encodes together"):
        GPTQ(weights="iq2_xs", act_order="group")
    with pytest.raises(OptionError, match="group_size 64: iq3_xxs has one scale for 32 columns"):
        GPTQ(weights="iq3_xxs", group_size=64)
    with pytest.raises(
        OptionError, match="allocate choices: iq3_s is no choice: the budget counts a code for each wei"
    ):
        GPTQ(allocate={"bits": 3.5, "choices": [{"weights": "iq3_s"}, {"weights": "int4"}]})


def test_importance_needs_a_hessian_and_scales_of_rows():
    for step in (RTN, OBQ, HQQ):
        with pytest.raises(OptionError, match="scale: importance needs the inputs of a layer, as gptq has them"):
            step(scale="importance")
    with pytest.raises(OptionError, match="scale: importance searches the scales of rows; use group_size: channel"):
        plain(scale="importance", group_size="tensor")
    with pytest.raises(OptionError, match="scale: importance needs the inputs of a layer"):
        SignRound(scale="importance", start="rtn")
    with pytest.raises(OptionError, match="scale: importance is not supported by this pass; use scale: mse"):
        SparseGPT(weights="int4", scale="importance")
    assert SignRound(scale="importance").scale == "importance"


def test_the_largest_weight_beside_it_sets_the_global_scale(layer_of):
    layer = replace(layer_of(), shared_absmax=10.0)
    found = plain(weights="nvfp4").codes(random(5, WIDTH), seen_of(correlated()), layer)
    assert found.shared.tolist() == [pytest.approx(268.8)]


@pytest.mark.parametrize(("order", "group_size"), combinations())
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale", ["absmax", "mse"])
def test_with_independent_inputs_it_is_exactly_rounding_to_nearest(layer_of, order, group_size, symmetric, scale):
    weight = random(5, WIDTH, seed=6)
    gptq_ = plain(weights="int4", group_size=group_size, act_order=order, symmetric=symmetric, scale=scale)
    found = gptq_.codes(weight, seen_of(torch.eye(WIDTH)), layer_of(storage=torch.bfloat16))
    wanted = quantize(weight, GRIDS["int4"], group_size, symmetric, scale, dtype=torch.bfloat16)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scale, wanted.scale)
    assert symmetric or torch.equal(found.zero, wanted.zero)
    assert torch.equal(found.dense(), wanted.dense())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("order", "group_size"), [c for c in combinations() if c[0] == "static" or not isinstance(c[1], int)]
)
def test_scales_that_are_fixed_beforehand_are_those_of_the_original_weight(layer_of, order, group_size, symmetric):
    weight = random(7, WIDTH, seed=7)
    found = plain(weights="int4", group_size=group_size, act_order=order, symmetric=symmetric).codes(
        weight, seen_of(correlated()), layer_of()
    )
    scale, zero = fit(weight, GRIDS["int4"], group_size, symmetric)
    assert torch.equal(found.scale, scale)
    assert symmetric or torch.equal(found.zero, zero)


def test_the_groups_of_act_order_group_are_runs_of_the_largest_inputs(layer_of):
    rows = correlated(seed=9)
    found = plain(group_size=16, act_order="group").codes(random(7, WIDTH), seen_of(rows), layer_of())
    largest_first = rows.square().sum(0).argsort(descending=True).tolist()
    wanted = [0] * WIDTH
    for place, column in enumerate(largest_first):
        wanted[column] = place // 16
    assert found.group_index.tolist() == wanted
    assert found.group_index.dtype == torch.int32
    assert found.scale.shape == (7, 3)
    assert found.group_size == 16


def test_the_first_group_of_act_order_group_has_the_scale_of_its_untouched_columns(layer_of):
    weight = random(7, WIDTH, seed=2)
    found = plain(weights="int4", group_size=16, act_order="group").codes(weight, seen_of(correlated()), layer_of())
    first = weight[:, found.group_index == 0]
    assert torch.equal(found.scale[:, 0], fit(first, GRIDS["int4"], "channel", True)[0][:, 0])


def test_large_inputs_first_helps_where_inputs_differ_in_size(layer_of):
    better = []
    for seed in range(8):
        rows, weight = correlated(seed=seed), random(32, WIDTH, seed=seed)
        natural, static = (
            plain(weights="int3", group_size="channel", act_order=order).codes(weight, seen_of(rows), layer_of())
            for order in ("none", "static")
        )
        better.append(error(static, weight, rows) < error(natural, weight, rows))
    assert sum(better) >= 6


@pytest.mark.parametrize(("order", "group_size"), combinations())
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_mask_survives_exactly(layer_of, order, group_size, symmetric):
    weight, mask = random(6, WIDTH, seed=1), random(6, WIDTH, seed=2) > 0
    found = plain(weights="int4", group_size=group_size, act_order=order, symmetric=symmetric).codes(
        weight * mask, seen_of(correlated()), layer_of(mask)
    )
    assert (found.dense()[~mask] == 0).all()
    assert (found.dense()[mask] != 0).float().mean() > 0.7  # what is kept is not lost


def test_kept_weights_make_up_for_the_rounding_of_a_masked_weight(layer_of):
    rows = correlated(seed=3)
    weight, mask = random(16, WIDTH, seed=1), random(16, WIDTH, seed=2) > 0
    found = plain(weights="int3", group_size=12).codes(weight * mask, seen_of(rows), layer_of(mask))
    nearest = quantize(weight * mask, GRIDS["int3"], 12, mask=mask)
    assert error(found, weight * mask, rows) < 0.8 * error(nearest, weight * mask, rows)


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_codes_are_computed_from_the_scale_as_it_is_stored(layer_of, storage, order):
    found = plain(group_size=16, act_order=order).codes(
        random(5, WIDTH), seen_of(correlated()), layer_of(storage=storage)
    )
    assert torch.equal(found.scale.to(storage).float(), found.scale)


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "int4", "group_size": 16},
        {"weights": "int3", "group_size": "channel", "symmetric": False},
        {"weights": "int4", "group_size": 16, "act_order": "group"},
        {"weights": "mxfp4"},
    ],
    ids=str,
)
def test_rows_are_solved_apart(options, layer_of):
    """Parts of the rows give the codes, scales and zero points of the whole weight."""
    step, width = GPTQ(**options), 64
    assert step.requires.by_rows and not GPTQ(weights="int4", group_size="tensor").requires.by_rows
    assert not GPTQ(weights="nvfp4").requires.by_rows  # one scale for the whole weight
    seen, weight = seen_of(correlated(width=width)), random(9, width, seed=1)
    mask = random(9, width, seed=2) > -1
    whole = step.solve(weight, seen, layer_of(mask))
    parts = [step.solve(weight[rows], seen, layer_of(mask).of_rows(rows)) for rows in (slice(0, 4), slice(4, 9))]
    found = Solution.of_rows(parts)
    assert (found.weight.codes == whole.weight.codes).float().mean() > 0.99  # products of other shapes round otherwise
    torch.testing.assert_close(found.weight.scale, whole.weight.scale, rtol=1e-3, atol=0)
    assert (found.weight.zero is None) == (whole.weight.zero is None)
    assert found.mask is whole.mask is None and found.transforms == whole.transforms == ()


def test_layers_with_the_same_input_do_not_disturb_each_other(layer_of):
    seen = seen_of(correlated())
    first, second = random(5, WIDTH, seed=1), random(9, WIDTH, seed=2)
    pass_ = plain(group_size=12, act_order="static")
    together = [pass_.codes(weight, seen, layer_of()).codes for weight in (first, second)]
    alone = [pass_.codes(weight, seen_of(correlated()), layer_of()).codes for weight in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_the_weight_and_the_mask_are_left_alone(layer_of):
    weight, mask = random(5, WIDTH), random(5, WIDTH, seed=1) > 0
    weight_before, mask_before = weight.clone(), mask.clone()
    plain(group_size=12, act_order="static").codes(weight, seen_of(correlated()), layer_of(mask))
    assert torch.equal(weight, weight_before)
    assert torch.equal(mask, mask_before)


def test_a_raised_damping_is_noted(layer_of, notes):
    rows = random(3, WIDTH)  # rank 3, and a damping that is lost in float32
    plain(group_size=12, damping=1e-9).codes(random(5, WIDTH), seen_of(rows), layer_of())
    [(kind, message, figures)] = notes
    assert kind == "fallback"
    assert message == "damping raised until the Hessian was positive definite"
    assert figures["damping"] > 1e-9


@pytest.mark.parametrize("order", ORDERS)
def test_channels_that_are_always_zero_are_rounded_to_nearest_and_noted(layer_of, notes, order):
    rows, weight = correlated(), random(5, WIDTH)
    dead = [4, 5, 30]
    rows[:, dead] = 0
    found = plain(weights="int4", group_size=12, act_order=order).codes(weight, seen_of(rows), layer_of())
    scale = spread(found.scale, WIDTH, 12, found.group_index)
    nearest = GRIDS["int4"].encode(weight, scale, None)
    assert torch.equal(found.codes[:, dead].float(), nearest[:, dead])
    assert notes == [("note", "input channels were always zero; their errors are not compensated", {"channels": 3})]


def test_inputs_that_are_all_zero_are_no_more_than_rounding(layer_of, notes):
    weight = random(5, WIDTH)
    found = plain(weights="int4", group_size=12).codes(weight, seen_of(torch.zeros(4, WIDTH)), layer_of())
    assert torch.equal(found.codes, quantize(weight, GRIDS["int4"], 12).codes)
    assert notes[0][2] == {"channels": WIDTH}


def test_no_token_is_an_error_that_names_the_layer(layer_of):
    with pytest.raises(NumericError, match=r"model.layers.0.mlp.up_proj: no calibration token reached this layer"):
        plain().codes(random(5, WIDTH), Gram(WIDTH, torch.device("cpu")), layer_of())


def test_inputs_that_are_not_finite_are_an_error(layer_of):
    rows = correlated()
    rows[3, 3] = float("inf")
    with pytest.raises(NumericError, match="NaN or infinity"):
        plain().codes(random(5, WIDTH), seen_of(rows), layer_of())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0}, "greater than 0"),
        ({"damping": -0.1}, "greater than 0"),
        ({"damping": 1.5}, "less than or equal to 1"),
        ({"act_order": "desc"}, "input should be 'none', 'static' or 'group'"),
        (
            {"act_order": "group", "group_size": "channel"},
            "needs a number as group_size, not 'channel'; write act_order: static",
        ),
        (
            {"act_order": "group", "group_size": "tensor"},
            "needs a number as group_size, not 'tensor'; write act_order: static",
        ),
        ({"weights": "fp8_e4m3", "symmetric": False}, "symmetric: false needs an integer grid"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(OptionError, match=message):
        plain(**options)


def test_only_act_order_group_needs_a_format_with_an_index():
    assert [plain(act_order=order).effects(LayerScheme((8, 64))).scheme.codes.indexed for order in ORDERS] == [
        False,
        False,
        True,
    ]


class Everything(Grid):
    """Every number is on this grid: what is left is the target of the sweep."""

    symmetric_only = True
    span = 1.0

    def fit(self, low, high, symmetric, dtype, shared=None):
        return torch.ones_like(low), None

    def encode(self, values, scale, zero):
        return values

    def decode(self, codes, scale, zero):
        return codes


def compared(rows, reference):
    seen = CrossGram(rows.shape[1], torch.device("cpu"))
    for part, wanted in zip(rows.split(70), reference.split(70), strict=True):
        seen.compare(part, wanted)
    return seen


@pytest.mark.parametrize("order", ["none", "static"])
def test_without_rounding_asymmetric_calibration_is_the_least_squares_fit(monkeypatch, layer_of, order):
    monkeypatch.setitem(GRIDS, "everything", Everything("everything", 8))
    swept = []
    monkeypatch.setattr(rounding, "sweep", lambda *args: swept.append(sweep(*args)) or swept[-1])
    reference, weight = correlated(), random(7, WIDTH, seed=3)
    rows = reference + 0.3 * random(*reference.shape, seed=8)
    pass_ = plain(
        weights="everything", group_size="channel", act_order=order, error="asymmetric", alpha=1.0, damping=1e-7
    )
    pass_.codes(weight, compared(rows, reference), layer_of())
    found = swept[0]
    if order == "static":
        columns = rows.square().sum(0).argsort(descending=True, stable=True)
        found = torch.empty_like(found).index_copy_(1, columns, found)
    # the weight for which rows V^T is nearest to reference W^T
    wanted = torch.linalg.lstsq(rows.double(), reference.double() @ weight.double().T).solution.T
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=2e-3)
    assert (found - weight).norm() > 0.1 * weight.norm()  # and that is another one


def test_asymmetric_calibration_brings_the_output_nearer_to_the_uncompressed_one(layer_of):
    for seed in range(5):
        reference, weight = correlated(seed=seed), random(16, WIDTH, seed=seed)
        rows = reference + 0.3 * random(*reference.shape, seed=seed + 20)
        found = {
            kind: plain(weights="int4", group_size=12, error=kind).codes(weight, compared(rows, reference), layer_of())
            if kind == "asymmetric"
            else plain(weights="int4", group_size=12).codes(weight, seen_of(rows), layer_of())
            for kind in ("symmetric", "asymmetric")
        }
        away = {kind: (rows @ codes.dense().T - reference @ weight.T).norm() for kind, codes in found.items()}
        assert away["asymmetric"] < away["symmetric"]


def test_where_the_inputs_are_those_of_the_uncompressed_model_both_are_the_same(layer_of):
    rows, weight = correlated(), random(7, WIDTH, seed=3)
    found = plain(group_size=12, error="asymmetric").codes(weight, compared(rows, rows), layer_of())
    seen = Gram(WIDTH, torch.device("cpu"))
    for part in rows.split(70):
        seen.update(part)
    assert torch.equal(found.codes, plain(group_size=12).codes(weight, seen, layer_of()).codes)


def test_asymmetric_calibration_keeps_the_mask(layer_of):
    reference, weight, mask = correlated(), random(6, WIDTH, seed=1), random(6, WIDTH, seed=2) > 0
    seen = compared(reference + 0.3 * random(*reference.shape), reference)
    for order in ORDERS:
        found = plain(group_size=12, act_order=order, error="asymmetric").codes(weight * mask, seen, layer_of(mask))
        assert (found.dense()[~mask] == 0).all()


def test_the_uncompressed_model_runs_only_where_it_is_asked_for():
    assert not plain().requires.reference
    assert plain(error="asymmetric").requires.reference
    with pytest.raises(OptionError, match="alpha has no effect with error: symmetric"):
        plain(alpha=0.5)


def test_tokens_of_unit_length_count_alike(layer_of):
    """A few tokens of small inputs in directions of their own, as attention sinks have after a norm."""
    ratios = []
    for seed in range(4):
        rows, weight = correlated(seed=seed), random(16, WIDTH, seed=seed + 9)
        sinks = 0.01 * random(4, WIDTH, seed=seed + 20)
        rows = torch.cat([rows, sinks])
        away = []
        for step in (plain(group_size=12), plain(group_size=12, normalize_tokens=True)):
            found = step.codes(weight, seen_of(rows, step.observer), layer_of())
            away.append(error(found, weight, sinks))
        ratios.append(away[1] / away[0])
    assert sum(ratios) / 4 < 0.9, ratios


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{"weights": "int3"}, {"weights": "int2", "symmetric": False}, {"weights": "nf4"}])
def test_refinement_lessens_the_error_of_the_output_and_keeps_the_mask(layer_of, order, options):
    rows, weight, mask = correlated(), random(32, WIDTH, seed=1), random(32, WIDTH, seed=2) > -1
    found = [
        GPTQ(group_size=16, act_order=order, refine=rounds, **options).codes(
            weight * mask, seen_of(rows), layer_of(mask, torch.bfloat16)
        )
        for rounds in (0, 1, 4)
    ]
    errors = [error(codes, weight * mask, rows) for codes in found]
    assert errors[1] < 0.995 * errors[0] and errors[2] <= errors[1] * (1 + 1e-3)
    for codes in found:
        assert (codes.dense()[~mask] == 0).all()
        assert torch.equal(codes.scale.bfloat16().float(), codes.scale)
        assert (codes.scale > 0).all()  # the format of this layer takes no negative scales


def test_scales_are_negative_where_the_longer_tail_is_above_zero(layer_of):
    weight = random(64, WIDTH, seed=1)
    takes = replace(layer_of(), negative_scales=True)
    errors, signs = {}, {}
    for name, layer, options in (
        ("signed", takes, {}),
        ("format", layer_of(), {}),
        ("option", takes, {"signed_scales": False}),
        ("absmax", takes, {"scale": "absmax"}),
        ("inputs", takes, {"activations": "int8"}),
    ):
        found = GPTQ(weights="int3", group_size=20, **options).codes(weight, seen_of(correlated()), layer)
        errors[name], signs[name] = error(found, weight, correlated()), bool((found.scale < 0).any())
    assert signs == {"signed": True, "format": False, "option": False, "absmax": False, "inputs": False}
    assert errors["signed"] < 0.95 * errors["format"] == 0.95 * errors["option"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"symmetric": False}, "for other weights than integers without zero points: scales are positive"),
        ({"weights": "nf4"}, "for other weights than integers"),
        ({"scale": "absmax"}, "without scale: mse"),
        ({"activations": "int8"}, "with rounded inputs"),
    ],
)
def test_signed_scales_that_cannot_be_are_an_error(options, reason):
    with pytest.raises(OptionError, match=f"signed_scales has no effect {reason}"):
        GPTQ(signed_scales=False, **options)


def test_the_defaults_are_the_setting_that_lost_least_where_the_grid_allows_it():
    assert (GPTQ().act_order, GPTQ().scale, GPTQ().refine) == ("static", "importance", 1)
    assert GPTQ(weights="ternary").scale == "absmean" == GPTQ(weights="ternary", group_size="tensor").scale
    step = GPTQ(overrides={"a": {"group_size": "tensor"}, "b": {"weights": "ternary"}})
    assert GPTQ(group_size="tensor").scale == "mse" == step.for_layer("a").scale
    assert step.for_layer("b").scale == "absmean"


@pytest.mark.parametrize("weights", ["int2", "int3", "int4"])
def test_the_defaults_have_less_error_on_other_inputs_than_the_paper(layer_of, weights):
    layer, ratios = replace(layer_of(), negative_scales=True), []
    for seed in range(4):
        rows, weight = correlated(tokens=400, seed=seed), random(48, WIDTH, seed=seed)
        seen, others = seen_of(rows[:300]), rows[300:]
        found = [step.codes(weight, seen, layer) for step in (GPTQ(weights=weights), plain(weights=weights))]
        ratios.append(error(found[0], weight, others) / error(found[1], weight, others))
    assert max(ratios) < 0.9, ratios
