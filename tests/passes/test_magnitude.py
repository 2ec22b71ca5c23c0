"""Magnitude: every pattern by hand, and one threshold for a whole model against one sort of all its weights."""

import pytest
import torch

import compress
from compress.layers.linear import linears
from compress.passes.prune.magnitude import Magnitude

WEIGHT = torch.tensor([[4.0, -1.0, 1.5, 0.5], [-3.0, 2.5, -2.0, -3.5]])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [[1, 0, 0, 0], [1, 1, 0, 1]]),
        ({"sparsity": 0.25}, [[1, 0, 1, 0], [1, 1, 1, 1]]),
        ({"pattern": "row"}, [[1, 0, 1, 0], [1, 0, 0, 1]]),
        ({"pattern": "2:4"}, [[1, 0, 1, 0], [1, 0, 0, 1]]),
        ({"pattern": "1:2"}, [[1, 0, 1, 0], [1, 0, 0, 1]]),
        ({"pattern": "2x1"}, [[1, 0, 0, 1], [1, 0, 0, 1]]),  # means 3.5, 1.75, 1.75, 2
        ({"pattern": "1x2", "sparsity": 0.25}, [[1, 1, 0, 0], [1, 1, 1, 1]]),
    ],
)
def test_what_is_kept_by_hand(layer_of, options, kept):
    solution = Magnitude(**options).solve(WEIGHT, None, layer_of())
    assert solution.mask.int().tolist() == kept
    assert torch.equal(solution.weight, WEIGHT * torch.tensor(kept))
    assert solution.zeros.expected_sparsity == 1 - torch.tensor(kept).float().mean()


def test_a_tail_stays_dense_and_is_told(layer_of, notes):
    solution = Magnitude(pattern="2:4").solve(torch.ones(3, 10), None, layer_of())
    first = [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert solution.mask.int().tolist() == [first, [0, 0, 1, 1, 0, 0, 1, 1, 1, 1], first]
    assert (solution.zeros.requested_sparsity, solution.zeros.expected_sparsity) == (0.5, 0.4)
    message = "pattern 2:4 fits the first 3 rows and 8 columns; the rest stays dense"
    assert notes == [("note", message, {"dense": 6})]


def test_a_layer_of_zeros_is_pruned_to_the_pattern_and_told(layer_of, notes):
    solution = Magnitude(pattern="2:4").solve(torch.zeros(2, 4), None, layer_of())
    assert solution.mask.int().tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    assert notes == [("fallback", "all scores are zero; magnitudes are used instead", {})]


def test_without_an_allocation_that_looks_at_inputs_it_needs_no_data():
    assert not Magnitude().requires.data and not Magnitude(allocate="global").requires.data
    assert Magnitude(allocate="owl").requires.data and Magnitude(allocate="sensitivity").requires.data


def test_one_threshold_for_the_model_is_one_sort_of_all_its_weights(tiny):
    model = tiny("llama").bfloat16()
    names = [name for name in linears(model) if "layers" in name]
    before = {name: model.get_submodule(name).weight.float() for name in names}
    everything = torch.cat([weight.abs().flatten() for weight in before.values()]).sort().values
    cut = everything[round(0.4 * everything.numel()) - 1]
    after = linears(compress.apply(model, [Magnitude(sparsity=0.4, allocate="global")]))
    zeros = 0
    for name in names:
        found, size = after[name].weight.float(), before[name].abs()
        zeros += int((found == 0).sum())
        assert (found[size > cut] != 0).all() and (found[size < cut] == 0).all()  # those at the threshold: either
    assert zeros == round(0.4 * everything.numel())
