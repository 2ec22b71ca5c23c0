"""PB-LLM: salient weights by hand, the loops of the paper, learned scales of both parts, the checkpoint, and its bits."""

import pytest
import torch
from draws import correlated, random, seen_of
from tolerances import LOGITS

import compress
from compress.errors import RecipeError, TargetError
from compress.layers.linear import linears
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.sparse import SparsePart
from compress.layers.scheme import LayerScheme
from compress.passes.contract.observers import Gram
from compress.passes.contract.options import OptionError
from compress.passes.quantize.pb_llm import PBLLM
from compress.passes.quantize.rtn import RTN


def dense(parts):
    return sum(part.dense(torch.float32) for part in parts)


def apart_inputs(width):
    """What is seen of one token along each axis: no weight can compensate for another."""
    return seen_of(torch.eye(width), Gram)


@pytest.mark.parametrize("score", ["magnitude", "hessian"])
def test_by_hand(layer_of, score):
    # 1 of 8 is salient: 5. The others have the mean magnitude (1 + 2 + 1 + 2 + 1 + 2 + 1.5) / 7 = 1.5.
    weight = torch.tensor([[1.0, -2.0, 1.0, -2.0, 5.0, 1.0, -2.0, 1.5]])
    step = PBLLM(salient=0.125, group_size=8, score=score, refine=0, damping=1e-6, shrinkage=0)
    binary, apart = step.solve(weight, apart_inputs(8), layer_of()).weight
    torch.testing.assert_close(
        binary.dense(torch.float32), 1.5 * torch.tensor([[1.0, -1, 1, -1, 1, 1, -1, 1]]), rtol=1e-6, atol=0
    )
    assert apart.kept.mask().tolist() == [[False] * 4 + [True] + [False] * 3]
    # 5 - 1.5 = 3.5 is 89.25 steps of 5 / 127.5
    torch.testing.assert_close(dense([binary, apart])[0, 4], torch.tensor(1.5 + 89 * 5 / 127.5))


def by_loops(weight, hessian, size, share):
    """Section 3 of the paper on the inverse Hessian, in float64: the weights, and what is salient."""
    step = weight.double().abs().amax(1) / 127.5
    work, inverse = weight.double().clone(), torch.linalg.inv(hessian.double())
    upper = torch.linalg.cholesky(inverse, upper=True)
    found, salient = torch.zeros_like(work), torch.zeros(weight.shape, dtype=torch.bool)
    for start in range(0, weight.shape[1], size):
        block = work[:, start : start + size]
        score = block**2 / upper.diagonal()[start : start + size] ** 2
        least = score.flatten().sort(descending=True).values[round(share * score.numel()) - 1]
        mask = salient[:, start : start + size] = score >= least
        scale = (block.abs() * ~mask).sum(1) / (~mask).sum(1)
        for i in range(start, start + size):
            sign = torch.where(work[:, i] > 0, scale, -scale)
            eight = ((work[:, i] - sign) / step).round() * step
            found[:, i] = torch.where(salient[:, i], sign + eight, sign)
            error = (work[:, i] - found[:, i]) / upper[i, i]
            work[:, i:] -= error[:, None] * upper[i, i:]
    return found, salient


def test_it_is_the_algorithm_of_the_paper(layer_of):
    weight, seen = random(24, 32), seen_of(correlated(width=32))
    step = PBLLM(salient=0.125, group_size=16, refine=0)
    binary, apart = step.solve(weight, seen, layer_of()).weight
    wanted, salient = by_loops(weight, seen.damped(step.regularization), 16, 0.125)
    assert torch.equal(apart.kept.mask(), salient)
    near = (dense([binary, apart]) - wanted.float()).abs() < 1e-3
    assert near.float().mean() > 0.99  # half-way between two codes the last digit decides


def test_refining_and_more_salient_weights_are_better(layer_of):
    rows, weight = correlated(400, 64), random(48, 64)

    def error(**options):
        found = dense(PBLLM(**options).solve(weight, seen_of(rows), layer_of()).weight)
        return float(((found - weight) @ rows.T).norm())

    assert error(refine=2) < error(refine=0)
    assert error(salient=0.3) < 0.7 * error(salient=0.05)


def test_all_that_is_stored_is_counted():
    shape = (576, 640)
    after = PBLLM(salient=0.1, group_size=128).effects(LayerScheme(shape)).scheme
    bits = 8 * after.size_bytes(torch.bfloat16) / (576 * 640)
    # signs, positions, 8 bits of a tenth, a scale of 16 bits per 128 weights, and one per row
    assert bits == pytest.approx(1 + 1 + 0.8 + 16 / 128 + 16 / 640, abs=1e-3)


def test_a_run_learns_the_scales_of_both_parts_and_its_size_is_as_planned(recipe, tmp_path):
    learned = compress.Distill(train=["scales"], steps=2, batch=2, learning_rate=0.05)
    asked = recipe(PBLLM(group_size=32), learned, save={"format": "native"})
    report = compress.run(asked, tmp_path / "out", progress=False).report
    assert report["size"]["tensor_bytes"] == report["predicted"]["tensor_bytes"]
    assert report["verified"]["own"] <= LOGITS
    loaded, _ = compress.load(tmp_path / "out")
    compress.run(recipe(PBLLM(group_size=32), save={"format": "native"}), tmp_path / "plain", progress=False)
    before, _ = compress.load(tmp_path / "plain")
    name = "model.layers.0.mlp.up_proj"
    for old, new in zip(before.get_submodule(name).all_parts, loaded.get_submodule(name).all_parts, strict=True):
        assert not torch.equal(old.free_scale, new.free_scale)
    binary, apart = linears(loaded)[name].all_parts
    assert isinstance(binary, CodesPart) and isinstance(apart, SparsePart)
    assert linears(loaded)[name].mask is None


def test_bad_input(recipe):
    for options, message in (
        ({"salient": 0}, "salient"),
        ({"salient_weights": "int2"}, "salient_weights"),
        ({"group_size": 4}, "group_size 4 is too small for binary weights; write at least 8"),
    ):
        with pytest.raises(OptionError, match=message):
            PBLLM(**options)
    with pytest.raises(TargetError, match="group_size 4096 is larger than its"):
        compress.plan(recipe(PBLLM(group_size=4096), save={"format": "native"}))
    with pytest.raises(TargetError, match="format: native|format compressed-tensors"):
        compress.plan(recipe(PBLLM(group_size=16), save={"format": "compressed-tensors"}))
    with pytest.raises((TargetError, RecipeError), match="quantized"):
        compress.plan(recipe(RTN(group_size=16), PBLLM(group_size=16)))
