"""The cubic of gradual pruning by hand, and masks on the way to a pattern."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import most_of

from compress.numerics.sparse.masks import Pattern
from compress.numerics.sparse.schedules import Cubic, partial_mask


def test_the_cubic_by_hand():
    """s_t = 0.9 - 0.8 (1 - (t - 2) / 8)^3 at t = 2, 4, 6, 8, 10; between them it stays."""
    cubic = Cubic(0.1, 0.9, begin=2, end=11, interval=2)
    assert [cubic.at(t) for t in range(12)] == pytest.approx(
        [0, 0, 0.1, 0.1, 0.5625, 0.5625, 0.8, 0.8, 0.8875, 0.8875, 0.9, 0.9]
    )
    assert [t for t in range(13) if cubic.due(t)] == [2, 4, 6, 8, 10] and cubic.last == 10


@given(st.integers(0, 9), st.integers(1, 20), st.integers(1, 30), st.floats(0, 0.4), st.floats(0.5, 0.9))
def test_it_never_falls_and_ends_at_the_final_sparsity_in_time(begin, long, every, initial, final):
    cubic = Cubic(initial, final, begin, begin + long, every)
    actual = [cubic.at(t) for t in range(begin + long + 1)]
    assert actual == sorted(actual) and actual[-1] == final and cubic.last <= cubic.end
    assert all(cubic.due(t) for t in range(1, len(actual)) if actual[t] != actual[t - 1])


def test_some_groups_are_at_the_pattern_and_those_lose_least():
    """2:4 lost: .3, .1, .2, .4; at a sparsity of .25 half of the groups, the second and the third, keep two."""
    rows = torch.tensor([[1, 2, 0.2, 0.1], [0.05, 9, 0.05, 9], [3, 0.1, 0.1, 3], [0.1, 0.3, 3, 3]])
    actual = partial_mask(Pattern("2:4"), rows, 0.75)
    assert actual.sum(1).tolist() == [4, 2, 2, 4]
    assert actual[1].tolist() == [False, True, False, True] and actual[2].tolist() == [True, False, False, True]
    assert torch.equal(partial_mask(Pattern("2:4"), rows, 0.5), Pattern("2:4").keep(rows, 0.5))
    assert bool(partial_mask(Pattern("2:4"), rows, 1.0).all())


@settings(max_examples=25)
@given(st.sampled_from(["row", "layer", "2:4", "1:4", "2x2"]), st.integers(0, 1000))
def test_masks_made_of_one_another_only_shrink_to_the_pattern(text, seed):
    pattern, draw = Pattern(text), torch.Generator().manual_seed(seed)
    mask, final = torch.ones(8, 18, dtype=torch.bool), 1 - (pattern.n_of_m[0] / 4 if pattern.n_of_m else 0.4)
    for share in (0.0, 0.3, 0.6, 1.0):
        score = torch.rand(8, 18, generator=draw).masked_fill(~mask, -1)  # magnitudes change on the way
        actual = partial_mask(pattern, score, 1 - share * final)
        assert bool((mask | ~actual).all()), "nothing comes back"
        mask = actual
    assert int((~mask).sum()) == pattern.removed((8, 18), 1 - final)
    assert pattern.n_of_m is None or most_of(mask, 4) == pattern.n_of_m[0]
