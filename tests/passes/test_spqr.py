"""SpQR: outliers by hand, groups that lose less without them, the checkpoint, its bits, and what it refuses."""

import pytest
import torch
from draws import correlated, random, seen_of
from tolerances import LOGITS

import compress
from compress.errors import TargetError
from compress.layers.parts.outliers import OutliersPart
from compress.layers.scheme import LayerScheme
from compress.passes.contract.options import OptionError
from compress.passes.quantize.gptq import GPTQ
from compress.passes.quantize.spqr import SpQR


def dense(parts):
    return sum(part.dense(torch.float32) for part in parts)


def test_the_gain_of_an_outlier_by_hand():
    # 2 bits: 0, 1, 2, 3 are exact alone. With 30 the levels are 0, 10, 20, 30, and 1, 2, 3 become 0.
    group = torch.tensor([[0.0, 1, 2, 3] * 3 + [0, 1, 2, 30.0]])
    gain = SpQR(bits=2).gain(group, torch.ones(16))
    error = 4 * 1 + 4 * 4 + 3 * 9
    assert gain[0, 15] == error
    assert gain[0, 1] == 1 and gain[0, 2] == 4 and gain[0, 0] == 0  # without it, its own error goes
    weighed = SpQR(bits=2).gain(group, torch.tensor([1.0] * 3 + [10.0] + [1] * 12))
    assert weighed[0, 15] == error + 9 * 9 and weighed[0, 3] == 90


def test_the_gain_is_that_of_every_other_group_without_the_weight():
    weight, importance = random(5, 48), random(48, seed=1).square() + 0.1
    step = SpQR(bits=3)
    gain = step.gain(weight, importance)
    for row, column in ((0, 0), (2, 20), (4, 47)):
        start = column // 16 * 16
        kept = [j for j in range(start, start + 16) if j != column]

        def error(columns, row=row):
            values = weight[row, columns]
            size = (values.max() - values.min()) / 7
            rounded = ((values - values.min()) / size).round() * size + values.min()
            return float(((rounded - values).square() * importance[columns]).sum())

        wanted = error(list(range(start, start + 16))) - error(kept)
        assert float(gain[row, column]) == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def test_outliers_are_exact_and_take_up_errors(layer_of):
    weight = random(32, 64)
    weight[3, 7], weight[20, 40] = 30.0, -25.0
    options = {"outliers": 2 / (32 * 64), "refine": 0}
    alone = SpQR(**options).solve(weight, seen_of(torch.eye(64)), layer_of()).weight
    assert isinstance(alone[1], OutliersPart)
    found = dense(alone)
    assert found[3, 7].item() == pytest.approx(30, rel=1e-3) and found[20, 40].item() == pytest.approx(-25, rel=1e-3)
    assert alone[1].columns.tolist() == [7, 40]
    together = dense(SpQR(**options).solve(weight, seen_of(correlated(300, 64)), layer_of()).weight)
    assert abs(float(together[3, 7]) - 30) > 0.05


@pytest.mark.parametrize("order", ["natural", "static"])
def test_each_of_its_parts_makes_the_error_less(layer_of, order):
    rows, weight = correlated(600, 128), random(64, 128) ** 3

    def error(step):
        found = step.solve(weight, seen_of(rows), layer_of(storage=torch.bfloat16)).weight
        return float(((dense(found) - weight) @ rows.T).norm())

    whole = error(SpQR(order=order))
    assert whole < error(SpQR(order=order, outliers=0))
    assert whole < error(SpQR(order=order, refine=0)) * (1 + 1e-6)
    assert whole < error(SpQR(order=order, scale="absmax"))


def test_it_is_better_than_groups_of_its_size_with_scales_of_more_bits(layer_of):
    rows, weight = correlated(600, 128), random(64, 128)
    found = dense(SpQR(outliers=0).solve(weight, seen_of(rows), layer_of()).weight)  # 3.63 bits
    plain = GPTQ(weights="int3", group_size=16).solve(weight, seen_of(rows), layer_of()).weight.dense()  # 4 bits
    assert float(((found - weight) @ rows.T).norm()) < float(((plain - weight) @ rows.T).norm())


def test_all_that_is_stored_is_counted():
    shape = (1024, 4096)
    bits = 8 * SpQR(outliers=0.01).effects(LayerScheme(shape)).scheme.size_bytes(torch.bfloat16) / (1024 * 4096)
    # codes; scales and minima in 3 bits; four float16 per tile; a float16 and a column per outlier; starts of rows
    assert bits == pytest.approx(3 + 6 / 16 + 64 / 256 + 0.01 * (16 + 32) + 32 / 4096, abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"outliers": 0, "bits": 2}, {"bits": 4, "order": "natural"}])
def test_a_run_and_its_checkpoint(recipe, tmp_path, options):
    report = compress.run(recipe(SpQR(**options), save={"format": "native"}), tmp_path, progress=False).report
    assert report["verified"]["own"] <= LOGITS
    assert report["size"]["tensor_bytes"] == report["predicted"]["tensor_bytes"]


def test_bad_input(recipe):
    for options, message in (({"bits": 5}, "bits"), ({"outliers": 0.5}, "outliers"), ({"scale": "absmean"}, "scale")):
        with pytest.raises(OptionError, match=message):
            SpQR(**options)
    with pytest.raises(TargetError, match="format: native"):
        compress.plan(recipe(SpQR(), save={"format": "compressed-tensors"}))
    reason = SpQR().effects(LayerScheme((64, 100))).refusal
    assert "its 100 inputs are not a multiple of 16" in reason
