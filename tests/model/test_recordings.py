"""Rows of recordings: features bit for bit, batches of one shape, and what of them is cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_families import tiny_model

from compress.errors import CalibrationError
from compress.model.inputs import inputs_of
from compress.model.recordings import batches, beginning, by_shape, is_recorded, longest, read, row_of, stacked
from compress.model.structure.front import front_of

shapes = st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 5), st.integers(1, 5)))


@given(shape=shapes, counts=st.lists(st.integers(1, 6), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_rows_come_back_bit_for_bit(shape, counts, seed):
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(len(counts), *shape, generator=draw)
    targets = [torch.randint(2**31, (count,), generator=draw).tolist() for count in counts]
    ids = stacked([row_of(*pair) for pair in zip(features, targets, strict=True)])
    found = read(ids)
    assert ids.dtype == torch.int64 and is_recorded(ids) and longest(ids) == max(counts)
    assert torch.equal(found.features, features)
    assert [row[:count] for row, count in zip(found.targets.tolist(), counts, strict=True)] == targets
    assert bool((found.targets >= 0).sum(1).eq(torch.tensor(counts)).all())
    assert sorted(i for group in by_shape(ids) for i in group) == list(range(len(counts)))
    for batch in batches(ids, 2):
        assert len(batch) <= 2 and len(set(batch[:, 1].tolist())) == 1


def test_token_ids_are_cut_and_recordings_are_not():
    text, ids = torch.arange(10).reshape(2, 5), row_of(torch.randn(3, 4), [1, 2, 3])[None]
    assert beginning(text, 3).tolist() == [[0, 1, 2]] and torch.equal(beginning(ids, 3), ids)
    assert [len(part) for part in batches(text, 1)] == [1, 1] and longest(text) == 5 and not is_recorded(text)


def test_features_of_two_shapes_are_no_batch():
    ids = stacked([row_of(torch.zeros(3), [1]), row_of(torch.zeros(4), [1])])
    assert by_shape(ids) == by_shape(ids, targets=False) == [[0], [1]]
    with pytest.raises(
        CalibrationError, match=r"features of shapes \[3\] and \[4\] do not make one batch; use batch: 1"
    ):
        read(ids)


def test_the_decoder_reads_its_start_and_no_ignored_label():
    model = tiny_model("whisper", decoder_start_token_id=2, pad_token_id=7)
    ids = stacked([row_of(torch.randn(8, 24), [5, 6, 3]), row_of(torch.randn(8, 24), [5])])
    assert inputs_of(model, ids)["decoder_input_ids"].tolist() == [[2, 5, 6], [2, 5, 7]]
    half = inputs_of(model.bfloat16(), ids)["input_features"]
    assert half.dtype == torch.bfloat16 and half.shape == (2, 8, 24)


def test_the_front_is_found_by_its_modules():
    front = front_of(tiny_model("whisper"))
    assert (front.channels, front.frames, front.stride, front.positions) == (8, 24, 2, 12)
    assert front.shapes == [(8, 24), (24, 8)] and str(front) == "8 bins and 24 frames"
    assert front.fits((8, 24)) and not front.fits((8, 23)) and not front.fits((9, 24)) and not front.fits((24,))
