"""Rows of recordings: features bit for bit, batches of one shape, and what of them is cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_families import tiny_model
from speech import moonshine, speech_to_text

from compress.errors import CalibrationError
from compress.models.kinds.inputs import inputs_of
from compress.models.kinds.recordings import (
    batches,
    beginning,
    by_shape,
    is_recorded,
    longest,
    read,
    row_bytes,
    row_of,
    rows_of,
    stacked,
)
from compress.models.structure.front import check_recordings, front_of

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
    assert front.shapes == [(8, 24)] and str(front) == "8 bins and 24 frames" and front.time is None
    assert front.fits((8, 24)) and not any(front.fits(shape) for shape in [(8, 23), (9, 24), (24,), (24, 8)])


def test_the_order_of_the_axes_is_that_which_the_encoder_reads():
    """Speech2Text has the bins last and any number of frames; the sizes of both axes may be equal."""
    front = front_of(speech_to_text()[0])
    assert front.orders == ("last",) and front.time == 0 and front.fits((40, 8)) and not front.fits((8, 40))
    assert front.fits((8, 8))


def test_the_fewest_frames_are_those_with_which_the_convolutions_run():
    model = moonshine()[0].eval()
    fewest = front_of(model).fewest
    assert str(front_of(model)) == f"{fewest} or more samples" and front_of(model).time == 0
    start = {"decoder_input_ids": torch.tensor([[2]])}
    model(input_values=torch.randn(1, fewest), **start)
    with pytest.raises(RuntimeError, match="Kernel size"):
        model(input_values=torch.randn(1, fewest - 1), **start)
    short = row_of(torch.randn(fewest - 1), [5])[None]
    said = rf"here: has features of shape \[{fewest - 1}\], but Moon.* reads {fewest} or more samples; make them"
    with pytest.raises(CalibrationError, match=said):
        check_recordings(model, short, ["here"])


def test_swapped_axes_and_no_targets():
    model = tiny_model("whisper")
    with pytest.raises(CalibrationError, match=r"shape \[24, 8\], .* 8 bins and 24 frames; swap these two axes"):
        check_recordings(model, row_of(torch.randn(24, 8), [5])[None], ["here"])
    with pytest.raises(CalibrationError, match="here: its transcript has no target tokens; write another, or leave"):
        check_recordings(model, row_of(torch.randn(8, 24), [])[None], ["here"])


@pytest.mark.parametrize(("name", "time"), [("input_values", 0), ("input_features", 0), ("input_features", 1)])
def test_padding_is_cut_off_by_the_mask(name, time):
    shape = (9,) if name == "input_values" else (9, 4) if time == 0 else (4, 9)
    features, labels = torch.randn(2, *shape), torch.tensor([[5, 3], [6, 3]])
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    ids = rows_of({name: features, "labels": labels, "attention_mask": mask}, time=time)
    assert torch.equal(read(ids[:1]).features[0], features[0])
    assert torch.equal(read(ids[1:]).features[0], features[1].narrow(time, 0, 5))
    same = rows_of({name: features, "labels": labels, "attention_mask": mask}, time=None)
    assert torch.equal(read(same).features, features)  # a model of one length reads its padding


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"attention_mask": torch.tensor([[0, 1, 1]])},
            r"attention_mask\[0\] is not ones and then zeros; write padding",
        ),
        ({"attention_mask": torch.zeros(1, 3)}, r"attention_mask\[0\] is not ones and then zeros"),
        (
            {"attention_mask": torch.ones(1, 4)},
            r"attention_mask has the shape \[1, 4\], but the features have \[1, 3\]",
        ),
        ({"decoder_input_ids": torch.ones(1, 1)}, "decoder_input_ids would have no effect; leave it out, and give"),
    ],
)
def test_masks_that_cut_nothing_off_and_unknown_keys(more, said):
    with pytest.raises(CalibrationError, match=f"calibration: {said}"):
        rows_of({"input_values": torch.randn(1, 3), "labels": torch.tensor([[5]]), **more}, time=0)


def test_batches_of_neighbours_are_not_copied():
    ids = stacked([row_of(torch.randn(8, 24), [5] * count) for count in (1, 1, 2, 1, 2)])
    found = batches(ids, 2)
    assert [part[:, 1].tolist() for part in found] == [[1, 1], [1], [2, 2]]
    shared = [part.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr() for part in found]
    assert shared == [True, True, False]
    assert ids[0].nbytes == row_bytes(front_of(tiny_model("whisper")).size, 2)


def test_one_tensor_of_rows_is_not_copied():
    ids = torch.arange(10).reshape(2, 5)
    assert stacked([ids]) is ids
