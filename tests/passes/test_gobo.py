"""GOBO: the tails apart, a dictionary by hand, the end of its iteration, pruned weights, and the checkpoint."""

import pytest
import torch
from draws import random
from tolerances import LOGITS

import compress
from compress.errors import TargetError
from compress.layers.parts.outliers import OutliersPart
from compress.passes.contract.options import OptionError
from compress.passes.quantize.gobo import GOBO


def dense(parts):
    return sum(part.dense(torch.float32) for part in parts)


def test_by_hand(layer_of):
    # 1 bit and one outlier of 8: 100 is apart; the others are two heaps around -1 and 1.
    weight = torch.tensor([[-1.1, -0.9, 0.9, 1.1], [-1.0, 100.0, 1.0, 1.0]])
    codebook, apart = GOBO(bits=1, outliers=0.125).solve(weight, None, layer_of()).weight
    torch.testing.assert_close(codebook.books.flatten(), torch.tensor([-1.0, 1.0]))
    assert isinstance(apart, OutliersPart) and apart.columns.tolist() == [1] and apart.rows.tolist() == [0, 0, 1]
    torch.testing.assert_close(dense([codebook, apart])[1, 1], torch.tensor(100.0))


@pytest.mark.parametrize("stop", ["l1", "l2"])
def test_its_end_is_the_least_of_its_own_error(layer_of, stop):
    weight = random(64, 64)
    errors = {}
    for other in ("l1", "l2"):
        difference = dense(GOBO(bits=3, outliers=0, stop=other).solve(weight, None, layer_of()).weight) - weight
        errors[other] = float(difference.abs().sum() if stop == "l1" else difference.square().sum())
    assert min(errors, key=lambda name: errors[name]) == stop


def test_a_gaussian_has_the_error_of_the_best_quantizer_of_a_gaussian(layer_of):
    """Max 1960: the least mean squared error of 8 levels for a standard Gaussian is 0.03454."""
    weight = random(512, 512)
    found = dense(GOBO(bits=3, outliers=0, stop="l2").solve(weight, None, layer_of()).weight)
    assert float((found - weight).square().mean()) == pytest.approx(0.03454, rel=0.02)


def test_outliers_are_exact_and_those_farthest_from_the_mean(layer_of):
    weight = random(32, 32) + 0.5
    codebook, apart = GOBO(bits=3, outliers=0.01, outlier_dtype="float32").solve(weight, None, layer_of()).weight
    far = (weight - weight.mean()).abs()
    kept = apart.dense(torch.float32) != 0
    assert kept.sum() == round(0.01 * 1024) and far[kept].min() >= far[~kept].max()
    torch.testing.assert_close(dense([codebook, apart])[kept], weight[kept])


def test_a_transposed_weight_is_as_good(layer_of):
    weight = random(32, 24)
    step = GOBO(bits=2, outliers=0.01)
    parts, other = (step.solve(w, None, layer_of()).weight for w in (weight, weight.T.contiguous().T))
    assert [part.sha256() for part in parts] == [part.sha256() for part in other]


def test_pruned_weights_stay_zero(layer_of):
    weight = random(16, 32)
    mask = weight.abs() > 0.5
    parts = GOBO(bits=3, outliers=0.02).solve(weight * mask, None, layer_of(mask)).weight
    assert not bool(dense(parts)[~mask].any()) and len(parts) == 2


def test_a_run_and_its_checkpoint(recipe, tmp_path):
    result = compress.run(recipe(GOBO(bits=4), save={"format": "native"}), tmp_path / "out", progress=False)
    assert result.report["verified"]["own"] <= LOGITS
    assert 4 < result.report["size"]["bits_per_weight"] < 4.5


def test_bad_input(recipe, tmp_path):
    with pytest.raises(OptionError, match="bits"):
        GOBO(bits=9)
    with pytest.raises(OptionError, match="outliers"):
        GOBO(outliers=1)
    with pytest.raises(TargetError, match="of format compressed-tensors|format compressed-tensors holds"):
        compress.plan(recipe(GOBO(), save={"format": "compressed-tensors"}))
