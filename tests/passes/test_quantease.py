"""QuantEase: the turns of the paper by hand and in loops, what an end is, outliers, zeros, and what it refuses."""

import pytest
import torch
from draws import correlated, random, seen_of
from tolerances import LOGITS

import compress
from compress.errors import RecipeError, TargetError
from compress.layers.parts.outliers import OutliersPart
from compress.numerics.quant.codes import Codes, quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.options import OptionError
from compress.passes.quantize.gptq import GPTQ
from compress.passes.quantize.quantease import QuantEase

OPTIONS = {"weights": "int3", "group_size": 16, "scale": "absmax"}


def dense(found):
    return found.dense() if isinstance(found, Codes) else sum(part.dense(torch.float32) for part in found)


def moderate(tokens=400, width=48):
    """Inputs of equal size that share some directions."""
    return random(tokens, width) + random(tokens, 6, seed=1) @ random(6, width, seed=2)


def test_two_columns_by_hand(layer_of):
    # H = [[2, 1], [1, 2]]; whole numbers up to 3: scale 3.5 / 3.5 = 1
    seen = seen_of(torch.linalg.cholesky(torch.tensor([[2.0, 1.0], [1.0, 2.0]])).T)
    step = QuantEase(weights="int3", group_size="channel", scale="absmax", damping=1e-6, iterations=1)
    found = step.codes(torch.tensor([[0.4, 3.5], [1.4, -3.5]]), seen, layer_of())
    # 0.4 becomes 0: the second is 3.5 + 0.4 / 2 = 3.7, and 3 at most. 1.4 becomes 1: -3.5 + 0.2 = -3.3
    assert found.codes.tolist() == [[0, 3], [1, -3]]
    again = step.model_copy(update={"iterations": 2}).codes(torch.tensor([[0.4, 3.5], [1.4, -3.5]]), seen, layer_of())
    # now 0.4 + (3.5 - 3) / 2 = 0.65 is 1, and 3.5 - 0.6 / 2 = 3.2 is 3; 1.4 - 0.5 / 2 = 1.15 stays
    assert again.codes.tolist() == [[1, 3], [1, -3]]


def by_loops(weight, hessian, codes, iterations, relaxed):
    """Algorithm 1 of the paper, entry by entry, in float64: the rounded weight."""
    hessian, weight = hessian.double(), weight.double()
    found = weight.clone()
    for iteration in range(1, iterations + 1):
        free = relaxed and iteration % relaxed == 0 and iteration <= iterations - 2
        for j in range(weight.shape[1]):
            best = found[:, j] + (weight - found) @ hessian[:, j] / hessian[j, j]
            scale = codes.scale[:, j // 16].double()
            found[:, j] = best if free else (best / scale).round().clamp(-4, 3) * scale
    return found


@pytest.mark.parametrize(("iterations", "relaxed"), [(1, None), (5, None), (5, 3)])
def test_it_is_the_algorithm_of_the_paper(layer_of, iterations, relaxed):
    weight, seen = random(12, 48), seen_of(moderate())
    step = QuantEase(**OPTIONS, iterations=iterations, relaxed=relaxed)
    found = step.codes(weight, seen, layer_of())
    start = quantize(weight, GRIDS["int3"], 16)
    assert torch.equal(found.scale, start.scale)
    wanted = by_loops(weight, seen.damped(step.regularization), start, iterations, relaxed)
    torch.testing.assert_close(found.dense(), wanted.float(), rtol=1e-4, atol=1e-4)


def test_at_its_end_no_other_code_is_better(layer_of):
    weight, seen = random(4, 32), seen_of(moderate(width=32))
    step = QuantEase(**OPTIONS, iterations=200, relaxed=None)
    found, hessian = step.codes(weight, seen, layer_of()).dense(), seen.damped(step.regularization)
    scale = quantize(weight, GRIDS["int3"], 16).scale
    for j in range(32):
        left = weight - found
        best = found[:, j] + left @ hessian[:, j] / hessian[j, j]
        rounded = (best / scale[:, j // 16]).round().clamp(-4, 3) * scale[:, j // 16]
        torch.testing.assert_close(rounded, found[:, j], rtol=1e-4, atol=1e-4)


def test_it_is_better_than_the_sweep_and_relaxed_iterations_help(layer_of):
    rows, weight = moderate(), random(64, 48)

    def error(step):
        return float(((dense(step.codes(weight, seen_of(rows), layer_of())) - weight) @ rows.T).norm())

    whole = error(QuantEase(**OPTIONS))
    assert whole < error(QuantEase(**OPTIONS, relaxed=None)) < error(QuantEase(**OPTIONS, relaxed=None, iterations=1))
    assert whole < error(GPTQ(**OPTIONS, act_order="none", refine=0))


def test_outliers_are_found_along_with_the_codes(layer_of):
    rows, weight = moderate(), random(32, 48)
    weight[3, 7], weight[20, 40] = 30.0, -25.0

    def solved(**options):
        return QuantEase(**OPTIONS, **options).codes(weight, seen_of(rows), layer_of())

    def error(found):
        return float(((dense(found) - weight) @ rows.T).norm())

    codes, apart = solved(outliers=2 / (32 * 48))
    assert isinstance(apart, OutliersPart) and apart.columns.tolist() == [7, 40]
    assert codes.scales()[3, 0] < 2  # no scale covers 30
    assert error([codes, apart]) < 0.75 * error(solved())
    assert error(solved(outliers=0.1)) < 0.8 * error([codes, apart])


def test_pruned_weights_stay_zero(layer_of):
    weight, mask = random(16, 48), random(16, 48, seed=5) > 0
    for options in ({}, {"outliers": 0.02}, {"symmetric": False}):
        step = QuantEase(**OPTIONS, iterations=4, **options)
        found = dense(step.codes(weight * mask, seen_of(correlated(width=48)), layer_of(mask)))
        assert not bool(found[~mask].any())


@pytest.mark.parametrize("options", [{}, {"outliers": 0.01, "order": "static"}])
def test_a_run_and_its_checkpoint(recipe, tmp_path, options):
    asked = recipe(QuantEase(iterations=3, group_size=32, **options), save={"format": "native"})
    report = compress.run(asked, tmp_path, progress=False).report
    assert report["verified"]["own"] <= LOGITS
    assert report["size"]["tensor_bytes"] == report["predicted"]["tensor_bytes"]


def test_bad_input(recipe):
    for options, message in (
        ({"iterations": 0}, "iterations"),
        ({"relaxed": 1}, "relaxed"),
        ({"outliers": 0.5}, "outliers"),
        ({"outlier_dtype": "float32"}, "with outliers: 0; leave it out"),
        ({"scale": "importance"}, "scale: importance"),
    ):
        with pytest.raises((OptionError, RecipeError), match=message):
            QuantEase(**options)
    with pytest.raises(TargetError, match="format: native"):
        compress.plan(recipe(QuantEase(outliers=0.01), save={"format": "compressed-tensors"}))
    assert compress.plan(recipe(QuantEase(group_size=32), save={"format": "compressed-tensors"}))
