"""Tokens that calibration has read are found in evaluation texts, at any offset, exactly or from a stored sketch."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.data.overlap import CalibrationRuns, overlap_of
from compress.models.kinds.batch import Batch, Examples


def drawn(count, length, seed):
    return torch.randint(5000, (count, length), generator=torch.Generator().manual_seed(seed))


def share_by_hand(calibration, evaluation, run):
    """The share of positions inside of runs that calibration contains, by comparing lists."""
    known = {tuple(row[i : i + run]) for row in calibration for i in range(len(row) - run + 1)}
    marked = total = 0
    for row in evaluation:
        inside = [False] * len(row)
        for i in range(len(row) - run + 1):
            if tuple(row[i : i + run]) in known:
                inside[i : i + run] = [True] * run
        marked, total = marked + sum(inside), total + len(row)
    return marked / total


@given(st.integers(0, 300), st.integers(0, 200), st.integers(0, 90), st.integers(17, 40))
def test_an_excerpt_at_any_offset_is_counted(start, place, length, run):
    text, windows = drawn(4, 100, 0), drawn(3, 80, 1)
    stream = windows.flatten()
    excerpt = text.flatten()[start : start + length]
    excerpt = excerpt[: len(stream) - place]
    stream[place : place + len(excerpt)] = excerpt
    windows = stream.reshape(3, 80)
    counted = CalibrationRuns.of(Examples.of_ids(text), run).share_of(Examples.of_ids(windows))
    assert counted == pytest.approx(share_by_hand(text.tolist(), windows.tolist(), run))


def test_different_texts_have_none_and_equal_ones_all():
    one, other = Examples.of_ids(drawn(8, 64, 0)), Examples.of_ids(drawn(8, 64, 1))
    assert overlap_of(one, other) == 0 and overlap_of(one, one) == 1
    short = Examples.of_ids(drawn(8, 20, 3))  # shorter than a run
    assert overlap_of(short, short) == 1 and overlap_of(one, short) == 0


def test_fillers_are_no_overlap():
    """A line of dashes, and a pattern of three tokens, are in any text."""
    line, pattern = torch.full((1, 64), 7), torch.tensor([[1, 2, 3] * 20])
    assert overlap_of(Examples.of_ids(line), Examples.of_ids(line)) == 0
    assert overlap_of(Examples.of_ids(pattern), Examples.of_ids(pattern)) == 0


def test_a_sketch_estimates_the_share():
    text = drawn(64, 512, 0)
    sketch = CalibrationRuns.of(Examples.of_ids(text)).sketch()
    assert sketch.one_in > 1 and len(sketch.hashes) < 50_000
    half = torch.cat([text.flatten()[333 : 333 + 4096], drawn(1, 4096, 1)[0]]).reshape(16, 512)
    assert CalibrationRuns.of_sketch(sketch).share_of(Examples.of_ids(half)) == pytest.approx(0.5, abs=0.05)
    assert CalibrationRuns.of_sketch(sketch).share_of(Examples.of_ids(drawn(16, 512, 2))) == 0
    few = CalibrationRuns.of(Examples.of_ids(text[:2]))
    assert CalibrationRuns.of_sketch(few.sketch()).share_of(Examples.of_ids(half)) == few.share_of(
        Examples.of_ids(half)
    )


def test_examples_with_features_are_compared_whole():
    """The same words are said in many recordings."""

    def recording(seed, labels=(5, 6, 7)):
        features = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(seed))
        return Batch({"input_features": features}, torch.tensor([labels]))

    calibration = Examples((recording(0), recording(1)))
    assert overlap_of(calibration, Examples((recording(0), recording(2)))) == 0.5
    assert CalibrationRuns.of_sketch(CalibrationRuns.of(calibration).sketch()).share_of(Examples((recording(1),))) == 1


def test_sources_and_targets_are_compared():
    text = drawn(2, 64, 0)
    calibration = Examples((Batch({"input_ids": text[:1]}, text[1:]),))
    assert overlap_of(calibration, Examples.of_ids(text)) == 1


@pytest.mark.slow
def test_usual_sizes_take_less_than_a_second():
    calibration, evaluation = Examples.of_ids(drawn(128, 2048, 0)), Examples.of_ids(drawn(128, 2048, 1))
    start = time.process_time()
    overlap_of(calibration, evaluation)
    assert time.process_time() - start < 1
