"""Patterns of configurations mean the same as for Python, and take no exponential time."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.checkpoint.formats.patterns import matches

ATOMS = st.sampled_from(["a", "b", ".", r"\d", r"\.", "[ab]", "[^a]", "^", "$", r"\b", "1"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{,2}"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
        inner.map(lambda one: f"(?={one})"),
        inner.map(lambda one: f"(?!{one})"),
    ),
    max_leaves=8,
)


@given(pattern=PATTERNS, name=st.text("ab.1", max_size=7))
def test_a_pattern_means_what_it_means_for_python(pattern, name):
    assert matches(pattern, name) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|a)*$", "(.*)*b", "a?" * 40 + "a" * 40 + "b", ".*" * 30 + "b", "(a{0,30}){30}b", "(a){20000000}"],
)
def test_no_pattern_takes_long(pattern):
    begin = time.process_time()
    assert not matches(pattern, "a" * 60 + "c")
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("pattern", ["(", "[", "*", r"(a)(b)\1(c)+", "(?i)a(b)*", "(" * 60 + ")*" * 60, "a" * 5000])
def test_what_cannot_be_matched_is_an_error(pattern):
    with pytest.raises(ValueError, match="pattern|regular expression"):
        matches(pattern, "abab")
