"""RIA: the score of the paper by hand, its limits, and rows and columns of zeros."""

import pytest
import torch
from draws import random

from compress.passes.contract.observers import InputNorm
from compress.passes.contract.options import OptionError
from compress.passes.prune.ria import RIA
from compress.passes.prune.wanda import Wanda

WEIGHT = torch.tensor([[3.0, -1.0], [1.0, 3.0]])


def seen_of(norms):
    seen = InputNorm(len(norms), torch.device("cpu"))
    seen.update(torch.diag(torch.tensor(norms)))
    return seen


def test_the_score_by_hand():
    # columns and rows all sum to 4: 3/4 + 3/4 and 1/4 + 1/4; norms 4 and 9, whose roots are 2 and 3
    torch.testing.assert_close(RIA().score(WEIGHT, seen_of([4.0, 9.0])), torch.tensor([[3.0, 1.5], [1.0, 4.5]]))
    uneven = torch.tensor([[1.0, 3.0], [1.0, 0.0]])
    wanted = torch.tensor([[0.5 + 0.25, 1 + 0.75], [0.5 + 1, 0]])
    torch.testing.assert_close(RIA(a=0).score(uneven, seen_of([4.0, 9.0])), wanted)


def test_a_one_is_the_norm_itself():
    seen, weight = seen_of([1.0, 2, 3, 4]), random(5, 4).abs()
    plain = RIA(a=0).score(weight, seen)
    torch.testing.assert_close(RIA(a=1).score(weight, seen), plain * seen.norm)


def test_no_row_or_column_is_removed_whole_where_magnitude_would(layer_of):
    weight = random(16, 16)
    weight[3] *= 0.01
    weight[:, 5] *= 0.01
    seen = seen_of([1.0] * 16)
    ria = RIA(repair=0, pattern="layer").solve(weight, seen, layer_of()).mask
    wanda = Wanda(repair=0, pattern="layer").solve(weight, seen, layer_of()).mask
    assert not wanda[3].any() and not wanda[:, 5].any()
    assert ria[3].any() and ria[:, 5].any()


def test_rows_and_columns_of_zeros_score_zero(layer_of, notes):
    weight = random(4, 4)
    weight[1] = weight[:, 2] = 0
    score = RIA().score(weight, seen_of([1.0, 2, 3, 4]))
    assert torch.isfinite(score).all()
    assert (score[1] == 0).all() and (score[:, 2] == 0).all() and (score[0, [0, 1, 3]] > 0).all()
    solution = RIA(repair=0).solve(random(4, 4), seen_of([0.0] * 4), layer_of())
    assert solution.mask.sum(1).tolist() == [2] * 4
    assert notes[0][:2] == ("fallback", "all scores are zero; magnitudes are used instead")


@pytest.mark.parametrize(
    ("options", "unit"), [({"pattern": "2:4"}, 4), ({"pattern": "row"}, 16), ({"pattern": "layer"}, 96)]
)
def test_every_pattern_keeps_the_highest_scores_of_its_units(layer_of, options, unit):
    weight, seen = random(6, 16), seen_of(random(16, seed=1).abs().tolist())
    score = RIA().score(weight, seen).reshape(-1, unit)
    kept = RIA(repair=0, **options).solve(weight, seen, layer_of()).mask.reshape(-1, unit)
    wanted = torch.zeros_like(kept).scatter_(1, score.topk(unit // 2).indices, True)
    assert torch.equal(kept, wanted)


def test_blocks_of_rows_are_kept_by_their_mean(layer_of):
    weight, seen = random(8, 6), seen_of(random(6, seed=1).abs().tolist())
    kept = RIA(repair=0, pattern="4x1").solve(weight, seen, layer_of()).mask.reshape(2, 4, 6)
    means = RIA().score(weight, seen).reshape(2, 4, 6).mean(1)
    assert torch.equal(kept.all(1), kept.any(1))
    assert means[kept.all(1)].min() > means[~kept.all(1)].max()


def test_a_negative_exponent_is_an_error():
    with pytest.raises(OptionError, match="greater than or equal to 0"):
        RIA(a=-0.5)
