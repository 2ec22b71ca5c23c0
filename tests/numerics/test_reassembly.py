"""Sub-channels and pairs of similar channels, by hand and against the error that merging them causes."""

import torch
from draws import random

from compress.numerics.reassembly import merging_errors, similar_pairs, sub_channels


def test_sub_channels_by_hand():
    assert sub_channels(torch.tensor([1.0, 2.0, 2.1, 9.0, 0.0]), 2.0).tolist() == [1, 1, 2, 5, 1]


def test_the_error_of_merging_two_channels_is_that_of_the_output():
    rows, weight = random(7, 6), random(5, 6, seed=1)
    actual = merging_errors(rows, weight)
    for i in range(3):
        for j in range(3):
            even, odd = 2 * i, 2 * j + 1
            merged = rows.clone()
            merged[:, [even, odd]] = (rows[:, even] + rows[:, odd])[:, None] / 2
            error = ((merged - rows) @ weight.T).square().sum()
            torch.testing.assert_close(actual[i, j].float(), error, rtol=1e-4, atol=1e-5)


def test_pairs_are_the_most_similar_ones_and_no_channel_is_in_two():
    errors = torch.tensor([[1.0, 5.0, 9.0], [2.0, 6.0, 9.0], [3.0, 4.0, 7.0]])  # of 0, 2, 4 and of 1, 3, 5
    empty = torch.zeros(6, dtype=torch.bool)
    assert similar_pairs(errors, empty, 1).tolist() == [[0, 1]]
    assert similar_pairs(errors, empty, 3).tolist() == [[0, 1], [4, 3], [2, 5]]
    assert similar_pairs(errors, empty, 0).shape == (0, 2)


def test_channels_that_are_split_are_in_no_pair():
    errors, spared = torch.tensor([[1.0, 5.0], [2.0, 6.0]]), torch.tensor([True, False, False, False])
    assert similar_pairs(errors, spared, 1).tolist() == [[2, 1]]
    assert similar_pairs(errors, spared, 2) is None
