"""Wanda: the score of the paper by hand, every pattern, and masks that only ever grow."""

import pytest
import torch
from draws import random, seen_of

from compress.passes.contract.facts import ANY_LAYER
from compress.passes.contract.observers import InputNorm
from compress.passes.contract.options import OptionError
from compress.passes.prune.wanda import Wanda

# Weights by row; inputs of three tokens whose channels have the L2 norms 1, 5, 3 and 2.
WEIGHT = torch.tensor([[4.0, -1.0, 1.0, 1.0], [-3.0, 0.5, -2.0, -1.0]])
INPUTS = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, -4.0, -2.0, 2.0], [0.0, 0.0, 1.0, 0.0]])


def test_the_score_by_hand():
    seen = seen_of(INPUTS, InputNorm)
    assert seen.norm.tolist() == [1, 5, 3, 2]
    assert Wanda().score(WEIGHT, seen).tolist() == [[4, 5, 3, 2], [3, 2.5, 6, 2]]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"sparsity": 0.5}, [[1, 1, 0, 0], [1, 0, 1, 0]]),  # magnitude alone would keep -3 and -2, and the 4
        ({"sparsity": 0.75}, [[0, 1, 0, 0], [0, 0, 1, 0]]),
        ({"sparsity": 0.25}, [[1, 1, 1, 0], [1, 1, 1, 0]]),
        ({"pattern": "1:2"}, [[0, 1, 1, 0], [1, 0, 1, 0]]),
        ({"pattern": "2:4"}, [[1, 1, 0, 0], [1, 0, 1, 0]]),
        ({"pattern": "layer", "sparsity": 0.5}, [[1, 1, 1, 0], [0, 0, 1, 0]]),  # 3 twice: the earlier one stays
        ({"pattern": "layer", "sparsity": 0.75}, [[0, 1, 0, 0], [0, 0, 1, 0]]),
        ({}, [[1, 1, 0, 0], [1, 0, 1, 0]]),
    ],
)
def test_what_is_kept_by_hand(layer_of, options, kept):
    solution = Wanda(repair=0, **options).solve(WEIGHT, seen_of(INPUTS, InputNorm), layer_of())
    assert solution.mask.int().tolist() == kept
    assert torch.equal(solution.weight, WEIGHT * torch.tensor(kept))
    assert solution.transforms == ()


def test_the_norm_of_the_inputs_decides_between_equal_weights(layer_of):
    rows = random(50, 8) * torch.tensor([1.0, 5, 2, 8, 3, 7, 4, 6])
    solution = Wanda(repair=0, sparsity=0.5).solve(torch.ones(3, 8), seen_of(rows, InputNorm), layer_of())
    assert solution.mask.int().tolist() == [[0, 1, 0, 1, 0, 1, 0, 1]] * 3


@pytest.mark.parametrize("pattern", ["row", "layer", "2:4"])
def test_pruning_again_keeps_what_was_pruned_pruned(layer_of, pattern):
    weight, seen = random(6, 16, seed=1), seen_of(random(20, 16, seed=2), InputNorm)
    old = random(6, 16, seed=3) > -0.4  # some weights are gone, not by any pattern
    solution = Wanda(repair=0, pattern=pattern).solve(weight * old, seen, layer_of(old))
    assert not (solution.mask & ~old).any()
    assert (solution.weight[~solution.mask] == 0).all()
    assert torch.equal(solution.weight[solution.mask], weight[solution.mask])
    if pattern == "2:4":
        assert int((solution.weight != 0).reshape(6, 4, 4).sum(2).max()) <= 2


def test_pruned_weights_count_towards_the_sparsity(layer_of):
    weight, seen = random(6, 16, seed=1), seen_of(random(20, 16, seed=2), InputNorm)
    first = Wanda(repair=0, sparsity=0.25).solve(weight, seen, layer_of())
    second = Wanda(repair=0, sparsity=0.5).solve(first.weight, seen, layer_of(first.mask))
    at_once = Wanda(repair=0, sparsity=0.5).solve(weight, seen, layer_of())
    assert torch.equal(second.mask, at_once.mask)
    less = Wanda(repair=0, sparsity=0.1).solve(first.weight, seen, layer_of(first.mask))
    assert torch.equal(less.mask, first.mask)


def test_a_weight_that_is_zero_but_kept_ranks_above_a_pruned_one(layer_of):
    mask = torch.tensor([[False, True, True, True]])
    weight = torch.tensor([[0.0, 0.0, 5.0, 6.0]])
    solution = Wanda(repair=0, sparsity=0.25).solve(weight, seen_of(torch.ones(1, 4), InputNorm), layer_of(mask))
    assert solution.mask.tolist() == mask.tolist()


def test_the_density_of_a_pattern_is_its_own():
    assert Wanda(pattern="2:4").density == 0.5
    assert Wanda(pattern="1:4").density == 0.25
    assert Wanda(sparsity=0.3).density == pytest.approx(0.7)
    assert Wanda().density == 0.5
    assert Wanda(pattern="1:4", sparsity=0.75).density == 0.25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "2:4", "sparsity": 0.6}, "pattern 2:4 fixes sparsity 0.5; leave sparsity out"),
        ({"pattern": 124}, 'quote N:M in YAML: "2:4"'),
        ({"pattern": "4:2"}, "N must be at least 1 and smaller than M"),
        ({"sparsity": 0}, "greater than 0"),
        ({"sparsity": 1}, "less than 1"),
        ({"allocate": "orl"}, "allocation 'orl' is not known; did you mean 'owl'?"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(OptionError, match=message):
        Wanda(**options)


def test_it_prunes_before_anything_is_quantized():
    assert Wanda.never_after == {"quantized"}
    assert Wanda().effects(ANY_LAYER).facts == {"masked"}
