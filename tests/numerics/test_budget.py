"""Choices within a budget: by hand, against all combinations, and what cannot be."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.numerics.budget import within_budget


def test_by_hand():
    items = {"a": {"small": (2, 10), "large": (4, 0)}, "b": {"small": (2, 3), "large": (4, 0)}}
    assert within_budget(items, 4) == {"a": "small", "b": "small"}
    assert within_budget(items, 6) == {"a": "large", "b": "small"}
    assert within_budget(items, 7.9) == {"a": "large", "b": "small"}
    assert within_budget(items, 8) == {"a": "large", "b": "large"}


def test_a_larger_choice_that_is_no_better_is_not_taken():
    assert within_budget({"a": {"small": (2, 1), "large": (4, 1), "same": (2, 3)}}, 9) == {"a": "small"}


OPTIONS = st.dictionaries(
    st.sampled_from("pqr"), st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=3
)


@given(st.dictionaries(st.sampled_from("abcd"), OPTIONS, min_size=1, max_size=4), st.integers(1, 40))
def test_the_best_within_the_budget(items, budget):
    least = sum(min(size for size, _ in options.values()) for options in items.values())
    if least > budget:
        with pytest.raises(ValueError, match="the smallest choices take"):
            within_budget(items, budget)
        return
    actual = within_budget(items, budget)
    chosen = [options[actual[item]] for item, options in items.items()]
    assert sum(size for size, _ in chosen) <= budget
    error = sum(error for _, error in chosen)
    all_values = [[*options.values()] for options in items.values()]
    best = min(sum(e for _, e in way) for way in product(*all_values) if sum(s for s, _ in way) <= budget)
    assert error == best
