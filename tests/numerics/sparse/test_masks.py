"""Masks: exact counts in every unit, ties as documented, and errors that say what to write."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from compress.numerics.sparse.masks import Pattern

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 40))


def scores(shape, seed, distinct=False):
    """Scores at least 0, with many ties unless they are distinct."""
    generator = torch.Generator().manual_seed(seed)
    if distinct:
        return torch.randperm(shape[0] * shape[1], generator=generator).reshape(shape).float()
    return torch.randint(0, 5, shape, generator=generator).float()


@settings(max_examples=50)
@given(shape=SHAPES, seed=st.integers(0, 10**6), density=st.floats(0, 1), pattern=st.sampled_from(["row", "layer"]))
def test_exactly_round_of_the_density_is_kept_and_nothing_kept_scores_less(shape, seed, density, pattern):
    score = scores(shape, seed)
    remaining = Pattern(pattern).keep(score, density)
    units = (
        [(score[i], remaining[i]) for i in range(shape[0])]
        if pattern == "row"
        else [(score.ravel(), remaining.ravel())]
    )
    for values, keep in units:
        assert int(keep.sum()) == round(density * values.numel())
        if keep.any() and not keep.all():
            assert values[keep].min() >= values[~keep].max()


@settings(max_examples=50)
@given(
    shape=SHAPES,
    seed=st.integers(0, 10**6),
    n_of_m=st.sampled_from([(1, 2), (2, 4), (4, 8), (3, 5), (1, 16), (5, 17), (1, 36)]),
)
def test_n_of_each_whole_m_are_kept_and_the_tail_stays_dense(shape, seed, n_of_m):
    n, m = n_of_m
    score = scores(shape, seed)
    pattern = Pattern(f"{n}:{m}")
    remaining = pattern.keep(score, density=0.123)  # the pattern has its own density
    full = shape[1] // m * m
    for row in range(shape[0]):
        for start in range(0, full, m):
            values, keep = score[row, start : start + m], remaining[row, start : start + m]
            tie_sign = -1 if row % 2 else 1
            best = sorted(range(m), key=lambda j, values=values, sign=tie_sign: (-values[j], sign * j))[:n]
            assert keep.nonzero().flatten().tolist() == sorted(best)
    assert remaining[:, full:].all()


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("row", [[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]),
        ("layer", [[1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0]]),
        ("2:4", [[1, 1, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 1, 1]]),
    ],
)
def test_ties_go_to_the_lower_column_with_n_of_m_in_other_rows_to_the_higher(pattern, kept):
    assert Pattern(pattern).keep(torch.ones(2, 8), 0.5).int().tolist() == kept


@pytest.mark.parametrize("pattern", ["row", "layer", "2:4"])
def test_the_highest_scores_by_sorting(pattern):
    score = scores((5, 16), seed=3, distinct=True)
    unit = {"row": 16, "layer": 80, "2:4": 4}[pattern]
    cut = score.reshape(-1, unit).median(dim=1, keepdim=True).values  # the lower of the two middle ones
    assert torch.equal(Pattern(pattern).keep(score, 0.5), (score.reshape(-1, unit) > cut).reshape(5, 16))


def test_n_of_m_is_read_from_the_text():
    assert Pattern("2:4").n_of_m == (2, 4)
    assert Pattern("row").n_of_m is None
    assert Pattern().text == "row"


@pytest.mark.parametrize("text", ["rows", "", "2:", ":4", "2:4:8", "a:b", "-1:4", "2 of 4", "2:4 "])
def test_an_unknown_pattern_says_what_to_write(text):
    with pytest.raises(ValueError, match="is not known; use row, layer, N:M such as 2:4, or RxC such as 4x1"):
        Pattern(text)


@pytest.mark.parametrize("text", ["4:4", "5:4", "0:4", "0:0"])
def test_n_must_be_at_least_one_and_smaller_than_m(text):
    with pytest.raises(ValueError, match="N must be at least 1 and smaller than M"):
        Pattern(text)


FIELD = TypeAdapter(Pattern)


def test_a_recipe_spells_a_pattern_as_text():
    assert FIELD.validate_python("2:4") == Pattern("2:4")
    assert FIELD.validate_python(Pattern("row")) == Pattern("row")
    assert FIELD.validate_json('"2:4"') == Pattern("2:4")
    assert FIELD.dump_python(Pattern("2:4")) == "2:4"
    assert FIELD.dump_json(Pattern("2:4")) == b'"2:4"'


@pytest.mark.parametrize(("number", "meant"), [(124, "2:4"), (62, "1:2"), (248, "4:8")])
def test_a_number_from_yaml_is_answered_with_the_pattern_that_was_meant(number, meant):
    with pytest.raises(ValidationError, match=f'pattern {number} is a number; quote N:M in YAML: "{meant}"'):
        FIELD.validate_python(number)


@pytest.mark.parametrize("value", [True, None, 2.4, ["2:4"]])
def test_what_is_not_text_is_no_pattern(value):
    with pytest.raises(ValidationError, match="is not a string; use row, layer, N:M such as 2:4, or RxC such as 4x1"):
        FIELD.validate_python(value)


def test_a_bad_text_in_a_recipe_is_a_validation_error():
    with pytest.raises(ValidationError, match="'5:4' keeps 5 of 4"):
        FIELD.validate_python("5:4")


# Blocks


@settings(max_examples=50)
@given(
    shape=st.tuples(st.integers(1, 14), st.integers(1, 20)),
    block=st.sampled_from([(4, 1), (1, 4), (2, 3), (5, 2)]),
    seed=st.integers(0, 10**6),
    density=st.floats(0, 1),
)
def test_whole_blocks_are_kept_by_their_mean_and_the_edge_stays_dense(shape, block, seed, density):
    score, (high, wide) = scores(shape, seed), block
    pattern = Pattern(f"{high}x{wide}")
    remaining = pattern.keep(score, density)
    actual = []
    for row in range(0, shape[0] // high * high, high):
        for column in range(0, shape[1] // wide * wide, wide):
            part = remaining[row : row + high, column : column + wide]
            assert part.all() or not part.any()
            actual.append((float(score[row : row + high, column : column + wide].mean()), bool(part.all())))
    assert sum(keep for _, keep in actual) == round(density * len(actual))
    lowest = min((mean for mean, keep in actual if keep), default=99)
    assert all(mean <= lowest + 1e-6 for mean, keep in actual if not keep)
    assert remaining[shape[0] // high * high :].all() and remaining[:, shape[1] // wide * wide :].all()


def test_weights_that_are_gone_add_nothing_to_their_block():
    score = torch.tensor([[-1.0, 5.0, 1.0, 1.0, -1.0, -1.0, 0.0, 0.0]])
    assert Pattern("1x2").units(score).tolist() == [2.5, 1, -1, 0]


@settings(max_examples=50)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 30)),
    seed=st.integers(0, 10**6),
    density=st.floats(0, 1),
    text=st.sampled_from(["row", "layer", "2:4", "3:7", "4x1", "2x3"]),
)
def test_what_will_be_removed_is_known_from_the_shape(shape, seed, density, text):
    pattern = Pattern(text)
    assert int((~pattern.keep(scores(shape, seed), density)).sum()) == pattern.removed(shape, density)
    rows, width = pattern.whole(shape)
    assert rows <= shape[0] and width <= shape[1] and width % pattern.span == 0


@pytest.mark.parametrize(
    ("text", "shape", "density", "message"),
    [
        ("2:4", (8, 3), 0.5, "pattern 2:4 has no whole unit in its 8 rows of 3"),
        ("4x1", (3, 8), 0.5, "pattern 4x1 has no whole unit in its 3 rows of 8"),
        ("row", (3, 8), 0.95, "sparsity 0.05 of its 3 rows of 8 is not one unit of pattern row; raise it"),
        ("8x8", (8, 8), 0.6, "sparsity 0.4 of its 8 rows of 8 is not one unit of pattern 8x8"),
        ("row", (3, 8), 0.5, None),
        ("2:4", (3, 9), 0.5, None),
    ],
)
def test_a_matrix_that_nothing_would_be_removed_from_is_refused(text, shape, density, message):
    actual = Pattern(text).refuses(shape, density)
    assert actual is None if message is None else actual.startswith(message)


@pytest.mark.parametrize("text", ["1x1", "0x4", "4x0"])
def test_a_block_is_more_than_one_weight(text):
    with pytest.raises(ValueError, match="a block needs at least one row and one column; write layer instead of 1x1"):
        Pattern(text)


def test_a_global_threshold_is_an_allocation():
    with pytest.raises(ValueError, match="use allocate: global, pattern: layer"):
        Pattern("global")
