"""BiLLM: groups and scales by hand, the loops of the paper, its true bits, learned scales, and what it refuses."""

import pytest
import torch
from draws import correlated, random, seen_of
from tolerances import LOGITS

import compress
from compress.errors import TargetError
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.planes import nearest_signs, residual_scales, split_scales
from compress.passes.contract.options import OptionError
from compress.passes.quantize.billm import BiLLM
from compress.passes.quantize.gptq import GPTQ


def dense(parts):
    return sum(part.dense(torch.float32) for part in parts)


def alone(width):
    """Inputs that are not correlated: no column compensates for another."""
    return seen_of(torch.eye(width))


def test_by_hand(layer_of):
    # 16 columns of one row: column 3 is salient. The others are 1 and 3 in turns: two sets with levels 1 and 3.
    weight = torch.tensor([[1.0, -3.0] * 8])
    weight[0, 3] = 40.0
    planes = BiLLM(block_size=16, most_salient=1, refine=0, damping=1e-6).solve(weight, alone(16), layer_of()).weight
    assert planes[0].group_index.tolist() == [0, 0, 0, 1] + [0] * 12
    torch.testing.assert_close(dense(planes), weight, rtol=1e-6, atol=1e-6)
    assert planes[0].scale[0, 0] == 2 and planes[1].scale[0, 0] == 1  # 2 - 1 and 2 + 1
    assert planes[0].scale[0, 1] == 40 and planes[1].scale[0, 1] < 1e-6  # a scale is above zero


def test_a_short_last_block_is_one_group(layer_of):
    planes = BiLLM(block_size=16, most_salient=4).solve(random(6, 40), alone(40), layer_of()).weight
    index = planes[0].group_index
    assert planes[0].scale.shape == (6, 5) and index[32:].tolist() == [4] * 8
    assert set(index[:16].tolist()) == {0, 1} and set(index[16:32].tolist()) == {2, 3}


def by_loops(weight, hessian, size, index):
    """The sweep of the paper in float64, with the sets of columns that were found."""
    work, upper = weight.double().clone(), torch.linalg.cholesky(torch.linalg.inv(hessian.double()), upper=True)
    found = torch.zeros_like(work)
    for start in range(0, weight.shape[1], size):
        here = torch.arange(start, min(start + size, weight.shape[1]))
        block, scales = work[:, here].clone(), {}
        for group in index[here].unique().tolist():
            fit = residual_scales if group % 2 else split_scales
            scales[group] = [s[:, None] for s in fit(block[:, index[here] == group])]
        for i in here.tolist():
            a, b = scales[int(index[i])]
            s, t = nearest_signs(work[:, i : i + 1], a, b)
            found[:, i] = (s * a + t * b)[:, 0]
            error = (work[:, i] - found[:, i]) / upper[i, i]
            work[:, i:] -= error[:, None] * upper[i, i:]
    return found


def test_it_is_the_sweep_of_the_paper(layer_of):
    weight, seen = random(24, 48), seen_of(correlated(width=48))
    step = BiLLM(block_size=16, most_salient=8, refine=0)
    planes = step.solve(weight, seen, layer_of()).weight
    wanted = by_loops(weight, seen.damped(step.regularization), 16, planes[0].group_index)
    torch.testing.assert_close(dense(planes), wanted.float(), rtol=1e-4, atol=1e-4)


def test_salient_columns_are_those_whose_errors_no_other_column_compensates(layer_of):
    rows, weight = random(400, 64), random(32, 64)
    rows[:, [5, 40]] *= 30
    index = BiLLM(block_size=32, most_salient=4).solve(weight, seen_of(rows), layer_of()).weight[0].group_index
    assert index[5] == 1 and index[40] == 3


def test_at_equal_bits_it_is_better_than_a_grid_without_zero_points(layer_of):
    rows, weight = correlated(900, 256), random(64, 256)

    def error(found):
        return float(((found - weight) @ rows.T).norm())

    found = dense(BiLLM().solve(weight, seen_of(rows), layer_of()).weight)
    grid = GPTQ(weights="int2", group_size=32).solve(weight, seen_of(rows), layer_of()).weight.dense()
    assert error(found) < error(grid)
    unrefined = dense(BiLLM(refine=0).solve(weight, seen_of(rows), layer_of()).weight)
    assert error(found) < error(unrefined)


def test_all_that_is_stored_is_counted():
    shape = (512, 1024)
    bits = 8 * BiLLM().effects(LayerScheme(shape)).scheme.size_bytes(torch.bfloat16) / (512 * 1024)
    # two signs, two scales for each of two sets per 128 columns, and the set of each column for either plane
    assert bits == 2 + 4 * 16 / 128 + 2 * 32 / 512


def test_a_run_learns_the_scales_of_both_planes_and_its_size_is_as_planned(recipe, tmp_path):
    learned = compress.Distill(train=["scales"], steps=2, batch=2, learning_rate=0.05)
    report = compress.run(
        recipe(BiLLM(block_size=32, most_salient=8), learned, save={"format": "native"}), tmp_path, progress=False
    ).report
    assert report["size"]["tensor_bytes"] == report["predicted"]["tensor_bytes"]
    assert report["verified"]["own"] <= LOGITS
    loaded, _ = compress.load(tmp_path)
    planes = loaded.model.layers[0].mlp.up_proj.all_parts
    assert len(planes) == 2 and torch.equal(planes[0].group_index, planes[1].group_index)


def test_bad_input(recipe):
    for options, message in (
        ({"block_size": 15}, "block_size"),
        ({"most_salient": 0}, "most_salient"),
        ({"block_size": 32}, "most_salient 50 leaves no other column in a block of 32; write a smaller number"),
        ({"alpha": 0.5}, "alpha"),
    ):
        with pytest.raises(OptionError, match=message):
            BiLLM(**options)
    with pytest.raises(TargetError, match="group_size 2048 is larger than its"):
        compress.plan(recipe(BiLLM(block_size=4096), save={"format": "native"}))
    with pytest.raises(TargetError, match="format: native"):
        compress.plan(recipe(BiLLM(), save={"format": "gptq"}))
