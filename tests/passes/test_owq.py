"""OWQ: the most sensitive columns stay as they are, the rest is rounded by GPTQ, at the bits that were asked for."""

import pytest
import torch
from draws import random

import compress
from compress.checkpoint.load import load
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract import observers
from compress.passes.contract.observers import Gram
from compress.passes.contract.options import OptionError
from compress.passes.quantize.gptq import GPTQ
from compress.passes.quantize.owq import OWQ

OPTIONS = {"weights": "int3", "group_size": 16, "scale": "absmax"}


def problem(rows=32, width=64, seed=0, loud=(5, 40)):
    """(weight, inputs with a few loud channels, what Gram saw)."""
    inputs = random(400, width, seed=seed) + random(400, 1, seed=seed + 1)
    inputs[:, list(loud)] *= 20
    seen = Gram(width, torch.device("cpu"))
    seen.update(inputs)
    return random(rows, width, seed=seed + 2), inputs, seen


def dense(solution):
    return sum(part.dense(torch.float32) for part in solution.weight)


def test_the_columns_are_those_of_the_largest_sensitivity(layer_of):
    weight, inputs, seen = problem()
    step = OWQ(**OPTIONS, budget=0.7)
    rounded = quantize(weight, GRIDS["int3"], 16).dense()
    sensitivity = (inputs.square().sum(0)) * (weight - rounded).square().sum(0)
    wanted = sensitivity.argsort(descending=True)[: step.columns_of((32, 64))].sort().values
    _, outliers = step.solve(weight, seen, layer_of()).weight
    assert outliers.columns.tolist() == wanted.tolist()
    assert {5, 40} <= set(wanted.tolist())


def test_columns_that_stay_have_codes_of_zero_and_make_up_for_the_others(layer_of):
    weight, _, seen = problem()
    codes, outliers = OWQ(**OPTIONS).solve(weight, seen, layer_of()).weight
    columns = outliers.columns.long()
    assert not bool(codes.dense(torch.float32)[:, columns].any())
    assert not torch.allclose(outliers.values.float(), weight[:, columns], atol=1e-3)  # they took up errors
    rest = [i for i in range(64) if i not in columns.tolist()]
    assert bool(codes.dense(torch.float32)[:, rest].any(0).all())


def test_by_hand_with_one_column_that_stays(layer_of):
    """Two columns, the second stays. H = [[2, 1], [1, 2]]: rounding w_0 by e moves w_1 by e * 0.8 * H_01 / H_11."""
    seen = Gram(2, torch.device("cpu"))
    root = torch.linalg.cholesky(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    seen.update(root.T * 2**0.5 / 2**0.5)
    weight = torch.tensor([[0.9, 5.4], [-2.2, 1.3]])
    options = {"weights": "int4", "group_size": "channel", "scale": "absmax", "budget": 0.1}
    step = OWQ(**options, damping=1e-6, shrinkage=0.2, outlier_dtype="float16")
    codes, outliers = step.solve(weight, seen, layer_of()).weight
    assert outliers.columns.tolist() == [1]
    first = codes.dense(torch.float32)[:, 0]
    wanted = weight[:, 1] + (weight[:, 0] - first) * 0.4
    torch.testing.assert_close(outliers.values[:, 0].float(), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("refine", [0, 2])
def test_one_factorization_serves_the_sweep_and_the_fits(layer_of, refine, monkeypatch):
    weight, _, seen = problem()
    factored = []
    inverse_factor = observers.inverse_factor
    monkeypatch.setattr(observers, "inverse_factor", lambda *a: factored.append(1) or inverse_factor(*a))
    OWQ(**OPTIONS, refine=refine).solve(weight, seen, layer_of())
    assert len(factored) == 1


def test_refinement_lowers_the_error(layer_of):
    for seed in (0, 10, 20):
        weight, inputs, seen = problem(seed=seed)
        error = [
            float(((dense(OWQ(**OPTIONS, refine=rounds).solve(weight, seen, layer_of())) - weight) @ inputs.T).norm())
            for rounds in (0, 1, 3)
        ]
        assert error[1] < error[0] and error[2] <= 1.001 * error[1]


@pytest.mark.parametrize("symmetric", [True, False])
def test_beside_loud_inputs_it_has_less_error_than_gptq(layer_of, symmetric):
    for seed in range(3):
        weight, inputs, seen = problem(seed=10 * seed)
        options = {**OPTIONS, "symmetric": symmetric}
        kept = dense(OWQ(**options, budget=0.5).solve(weight, seen, layer_of()))
        swept = GPTQ(**options, refine=0).codes(weight, seen, layer_of()).dense()
        error = [float(((found - weight) @ inputs.T).norm()) for found in (kept, swept)]
        assert error[0] < 0.9 * error[1]


def test_pruned_weights_stay_zero(layer_of):
    weight, _, seen = problem()
    mask = random(32, 64, seed=9) > 0
    found = dense(OWQ(**OPTIONS).solve(weight * mask, seen, layer_of(mask)))
    assert not bool(found[~mask].any())


@pytest.mark.parametrize(("shape", "budget", "count"), [((576, 576), 0.1, 3), ((1536, 576), 0.5, 17), ((8, 8), 0.1, 1)])
def test_the_budget_pays_for_so_many_columns(shape, budget, count):
    step = OWQ(**OPTIONS, budget=budget)
    assert step.columns_of(shape) == count
    before, after = LayerScheme(shape), step.effects(LayerScheme(shape)).scheme
    codes = after.with_parts(after.parts[0])
    extra = 8 * (after.size_bytes(torch.float16) - codes.size_bytes(torch.float16)) / (shape[0] * shape[1])
    assert count == 1 or extra <= budget
    assert before.plain


def test_mistakes_in_its_options():
    with pytest.raises(OptionError, match="greater than 0"):
        OWQ(budget=0)


def test_a_run_stores_both_parts_and_their_bits_are_counted(recipe, tmp_path):
    asked = recipe(OWQ(weights="int3", group_size=32, budget=0.5), save={"format": "native"})
    report = compress.run(asked, tmp_path).report
    assert report["size"]["tensor_bytes"] == report["predicted"]["tensor_bytes"]
    model = load(tmp_path)[0]
    layer = model.model.layers[0].mlp.up_proj
    codes, outliers = layer.all_parts
    assert outliers.values.dtype == torch.float16
    assert not bool(codes.dense(torch.float32)[:, outliers.columns.long()].any())
    # 3 bits, a float32 scale per 32 weights, and up to 0.5 for the columns
    assert 4 < report["size"]["bits_per_weight"] <= 4.5 + 1e-6
