"""OliVe: codes by hand, the best kind of every pair, scales, the sweep, pruned weights, files, and what it refuses."""

import itertools

import pytest
import torch
from draws import correlated, random, seen_of
from tolerances import LOGITS

import compress
from compress.errors import RecipeError, TargetError
from compress.layers.parts.pairs import PairsPart, PairsScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.pairs import OUTLIERS, decode, fit, quantized
from compress.passes.contract.options import OptionError
from compress.passes.quantize.olive import Olive
from compress.passes.quantize.rtn import RTN


def dense(solution):
    (part,) = solution.weight
    return part.dense(torch.float32)


def test_codes_by_hand():
    # scale 1: 3 and -7 are integers; 50 is 48 and its neighbour a victim, so is the smaller one of -90 and 13
    weight = torch.tensor([[3.2, -6.8, 50.0, 4.0, -90.0, 13.0, 0.4, 15.0]])
    codes = quantized(weight, torch.tensor([[1.0]]), "channel")
    # 48 is code 5; -96 is 8 + 7; 16 is code 2; a victim is 8; -7 is 9
    assert codes.tolist() == [[3, 9, 5, 8, 15, 8, 8, 2]]
    assert decode(codes, torch.float32).tolist() == [[3, -7, 48, 0, -96, 0, 0, 16]]


def every_pair():
    """All values that two weights can have together."""
    normal, special = range(-7, 8), [s * o for s in (-1, 1) for o in OUTLIERS]
    return [*itertools.product(normal, normal), *((o, 0) for o in special), *((0, o) for o in special)]


def test_all_pairs_come_back_and_the_nearest_is_taken():
    pairs = torch.tensor(every_pair(), dtype=torch.float32)
    codes = quantized(pairs, torch.ones(len(pairs), 1), "channel")
    assert torch.equal(decode(codes, torch.float32), pairs)
    assert len({tuple(row) for row in codes.tolist()}) == len(pairs) == 225 + 28
    weight = random(300, 2) * 15
    found = decode(quantized(weight, torch.ones(300, 1), "channel"), torch.float32)
    best = (weight[:, None] - pairs).square().sum(-1).amin(1)
    torch.testing.assert_close((weight - found).square().sum(1), best)


@pytest.mark.parametrize("size", ["tensor", "channel", 8])
def test_the_scale_lets_outliers_be_outliers(size):
    weight = random(6, 64)
    weight[:, 5] = 9.0
    scale = fit(weight, size, torch.bfloat16)
    assert torch.equal(scale.to(torch.bfloat16).float(), scale)
    whole = scale if size == "channel" else fit(weight, "channel", torch.bfloat16)
    assert (whole < 9 / 7).all()  # 9 is not covered by integers
    part = PairsPart.of(quantized(weight, scale, size), scale, size)
    plain = RTN(weights="int4", group_size=size).grid
    assert part.dense(torch.float32)[:, 5].abs().amin() > 7.5 and plain.bits == 4


def test_it_is_better_than_integers_where_rows_have_outliers(layer_of):
    weight = random(16, 128)
    weight[:, ::31] *= 8
    found = dense(Olive().solve(weight, None, layer_of()))
    plain = RTN(weights="int4", group_size="channel", scale="mse").solve(weight, None, layer_of()).weight.dense()
    assert float((found - weight).norm()) < 0.7 * float((plain - weight).norm())


def test_the_sweep_compensates_and_gives_the_same_codes_without_correlation(layer_of):
    rows, weight = correlated(400, 64), random(24, 64)
    options = {"group_size": 32}
    apart = [
        Olive(**options, **more).solve(weight, seen_of(torch.eye(64)), layer_of()).weight[0].sha256()
        for more in ({}, {"compensate": True})
    ]
    assert apart[0] == apart[1]
    errors = [
        float(((dense(Olive(**options, **more).solve(weight, seen_of(rows), layer_of())) - weight) @ rows.T).norm())
        for more in ({}, {"compensate": True})
    ]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("compensate", [False, True])
def test_pruned_weights_stay_zero(layer_of, compensate):
    weight, mask = random(16, 64), random(16, 64, seed=5) > 0
    found = dense(Olive(compensate=compensate).solve(weight, seen_of(correlated(width=64)), layer_of(mask)))
    assert not bool(found[~mask].any()) and bool(found[mask].any())


@pytest.mark.parametrize("size", ["tensor", "channel", 8])
def test_a_part_is_read_back_as_it_was_and_is_as_large_as_its_scheme_says(size):
    weight = random(5, 24) * 3
    scale = fit(weight, size, torch.float32)
    part = PairsPart.of(quantized(weight, scale, size), scale, size)
    scheme = LayerScheme(part.shape, (part.scheme,))
    assert LayerScheme.from_json(scheme.to_json()) == scheme and scheme.quantized and scheme.free_scales
    tensors = {f"weight_{name}": tensor for name, tensor in part.tensors().items()}
    assert sum(t.nbytes for t in tensors.values()) == scheme.size_bytes(torch.float32)
    ((found,), ()) = scheme.read(tensors)
    assert found.sha256() == part.sha256()
    ids = torch.tensor([4, 0])
    assert torch.equal(found.rows_at(ids, torch.float32), part.dense(torch.float32)[ids])
    values = random(5, 24, seed=2)
    torch.testing.assert_close(
        (part.spread(torch.ones_like(scale)) * values).sum(), part.sum_groups(values).sum(), rtol=1e-4, atol=1e-4
    )
    assert part.in_storage(torch.bfloat16).dtype == torch.bfloat16
    broken = part.words.clone()
    broken[2, 0] = 0x88  # two victims
    with pytest.raises(ValueError, match="weight_packed holds a pair with a victim but without an outlier"):
        scheme.read(tensors | {"weight_packed": broken})


def test_a_run_learns_its_scales(recipe, tmp_path):
    learned = compress.Distill(train=["scales"], steps=2, batch=2)
    report = compress.run(recipe(Olive(), learned, save={"format": "native"}), tmp_path, progress=False).report
    assert report["verified"]["own"] <= LOGITS
    assert report["size"]["tensor_bytes"] == report["predicted"]["tensor_bytes"]


def test_bad_input(recipe):
    for options, message in (
        ({"group_size": 33}, "group_size 33 splits a pair; write an even number"),
        ({"damping": 0.1}, "with compensate: false; leave it out"),
        ({"shrinkage": 0.2}, "shrinkage has no effect with compensate: false; leave it out"),
        ({"group_size": 0}, "must be a positive number of columns"),
    ):
        with pytest.raises((OptionError, RecipeError), match=message):
            Olive(**options)
    assert "its 33 inputs are no pairs" in Olive().effects(LayerScheme((8, 33))).refusal
    assert "do not divide its 40 inputs" in Olive(group_size=16).effects(LayerScheme((8, 40))).refusal
    assert PairsScheme("tensor").refuses((8, 40)) is None
    with pytest.raises(TargetError, match="format: native"):
        compress.plan(recipe(Olive(), save={"format": "compressed-tensors"}))
