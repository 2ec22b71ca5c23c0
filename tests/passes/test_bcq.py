"""BCQ: planes by hand, the solvers, the sweep in loops, its bits, all scales learned, and what it refuses."""

import pytest
import torch
from draws import correlated, random, seen_of
from tolerances import LOGITS

import compress
from compress.errors import TargetError
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.planes import levels_of
from compress.passes.contract.options import OptionError
from compress.passes.quantize.bcq import BCQ
from compress.passes.quantize.gptq import GPTQ


def dense(parts):
    return sum(part.dense(torch.float32) for part in parts)


def test_by_hand(layer_of):
    # 4 + 2 + 1 in all signs: eight levels that three planes hold exactly, two of each
    weight = torch.tensor([[-7.0, -5, -3, -1, 1, 3, 5, 7] * 2])
    planes = BCQ(bits=3, group_size=16).solve(weight, seen_of(torch.eye(16)), layer_of()).weight
    torch.testing.assert_close(dense(planes), weight, rtol=1e-5, atol=1e-5)
    assert sorted(round(float(plane.scale)) for plane in planes) == [1, 2, 4]


def by_loops(weight, hessian, step, scales):
    """The sweep in float64 for one group of all columns, with the scales that were found."""
    work, upper = weight.double().clone(), torch.linalg.cholesky(torch.linalg.inv(hessian.double()), upper=True)
    levels, found = levels_of(scales).double(), torch.zeros_like(weight.double())
    for i in range(weight.shape[1]):
        nearest = (levels - work[:, i : i + 1]).abs().argmin(1, keepdim=True)
        found[:, i] = levels.gather(1, nearest)[:, 0]
        error = (work[:, i] - found[:, i]) / upper[i, i]
        work[:, i:] -= error[:, None] * upper[i, i:]
    return found


def test_it_is_the_sweep_over_the_sums_of_its_scales(layer_of):
    weight, seen = random(12, 32), seen_of(correlated(width=32))
    step = BCQ(bits=2, group_size="channel", order="natural", refine=0)
    planes = step.solve(weight, seen, layer_of()).weight
    scales = torch.cat([plane.scale for plane in planes], dim=1)
    wanted = by_loops(weight, seen.damped(step.regularization), step, scales)
    torch.testing.assert_close(dense(planes), wanted.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", ["natural", "static"])
def test_each_of_its_steps_makes_the_error_less(layer_of, order):
    rows, weight = correlated(600, 100), random(48, 100)

    def error(**options):
        step = BCQ(**{"bits": 2, "group_size": 32, "order": order, **options})
        return float(((dense(step.solve(weight, seen_of(rows), layer_of()).weight) - weight) @ rows.T).norm())

    whole = error()
    assert whole < error(refine=1) < error(refine=0) < error(refine=0, solver="greedy")
    assert error(bits=3) < 0.7 * whole
    grid = GPTQ(weights="int2", group_size=32).solve(weight, seen_of(rows), layer_of()).weight.dense()
    assert error(group_size="channel") < float(((grid - weight) @ rows.T).norm())  # with far fewer scales


def test_all_that_is_stored_is_counted():
    bits = 8 * BCQ(bits=3).effects(LayerScheme((512, 1024))).scheme.size_bytes(torch.bfloat16) / (512 * 1024)
    assert bits == 3 * (1 + 16 / 128)


def test_a_run_learns_the_scales_of_all_planes_and_its_size_is_as_planned(recipe, tmp_path):
    learned = compress.Distill(train=["scales"], steps=2, batch=2, learning_rate=0.05)
    step = BCQ(bits=2, group_size=32, normalize_tokens=True)
    report = compress.run(recipe(step, learned, save={"format": "native"}), tmp_path, progress=False).report
    assert report["size"]["tensor_bytes"] == report["predicted"]["tensor_bytes"]
    assert report["verified"]["own"] <= LOGITS
    loaded, _ = compress.load(tmp_path)
    assert [part.scheme.grid.name for part in loaded.model.layers[0].mlp.up_proj.all_parts] == ["binary"] * 2


def test_bad_input(recipe):
    for options, message in (
        ({"bits": 6}, "bits"),
        ({"group_size": 4}, "group_size 4 is too small for 3 scales; write at least 8"),
        ({"solver": "exact"}, "solver"),
    ):
        with pytest.raises(OptionError, match=message):
            BCQ(**options)
    with pytest.raises(TargetError, match="group_size 4096 is larger than its"):
        compress.plan(recipe(BCQ(group_size=4096), save={"format": "native"}))
    with pytest.raises(TargetError, match="format: native"):
        compress.plan(recipe(BCQ(group_size=32), save={"format": "awq"}))
