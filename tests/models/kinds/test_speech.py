"""Models of speech: the front of their encoder, batches of features, and what of them is padding."""

import pytest
import torch
from model_families import tiny_model
from speech import moonshine, speech_to_text

from compress.errors import CalibrationError
from compress.models.kinds.batch import Examples
from compress.models.kinds.contract import run_on
from compress.models.kinds.front import front_of
from compress.models.kinds.kinds import examples_of
from compress.models.kinds.speech import Speech, recording


def test_the_decoder_reads_its_start_and_no_ignored_label():
    """Of a batch with transcripts of two lengths; features are cast to the dtype of the model."""
    model, features = tiny_model("whisper", decoder_start_token_id=2), torch.randn(2, 8, 24)
    labels = torch.tensor([[5, 6, 3], [5, -100, -100]])
    batch = examples_of(model, {"input_features": features, "labels": labels}).batch()
    assert torch.equal(batch.labels, labels) and torch.equal(batch.inputs["input_features"], features)
    assert batch.inputs["decoder_input_ids"].tolist() == [[2, 5, 6], [2, 0, 0]]
    with torch.no_grad():
        wanted = model(input_features=features[1:], labels=torch.tensor([[5]])).logits
        torch.testing.assert_close(run_on(model, batch).logits[1:, :1], wanted, rtol=1e-5, atol=1e-5)
        assert run_on(model.bfloat16(), batch).logits.dtype == torch.bfloat16


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
    short = Examples((recording(model, torch.randn(fewest - 1), torch.tensor([5])),))
    said = rf"here: has features of shape \[{fewest - 1}\], but Moon.* reads {fewest} or more samples; make them"
    with pytest.raises(CalibrationError, match=said):
        Speech().check(model, short, ["here"])


def test_swapped_axes_and_no_targets():
    model = tiny_model("whisper", decoder_start_token_id=2)
    swapped, empty = (
        Examples((recording(model, torch.randn(shape), torch.tensor(tokens, dtype=torch.int64)),))
        for shape, tokens in (((24, 8), [5]), ((8, 24), []))
    )
    with pytest.raises(CalibrationError, match=r"shape \[24, 8\], .* 8 bins and 24 frames; swap these two axes"):
        Speech().check(model, swapped, ["here"])
    with pytest.raises(CalibrationError, match="here: its transcript has no target tokens; write another, or leave"):
        Speech().check(model, empty, ["here"])


@pytest.mark.parametrize("made", [speech_to_text, moonshine])
def test_padding_is_cut_off_by_the_mask(made):
    model, features = made()
    padded, labels = torch.nn.utils.rnn.pad_sequence(features[:2], batch_first=True), torch.tensor([[5, 3], [6, 3]])
    mask = (torch.arange(padded.shape[1]) < torch.tensor([[len(each)] for each in features[:2]])).long()
    given = {model.main_input_name: padded, "labels": labels, "attention_mask": mask}
    examples = examples_of(model, given)
    for example, wanted in zip(examples, features, strict=False):
        assert torch.equal(example.inputs[model.main_input_name][0], wanted)


def test_a_model_of_one_length_reads_its_padding():
    model, features = tiny_model("whisper", decoder_start_token_id=2), torch.randn(1, 8, 24)
    mask = torch.tensor([[1] * 20 + [0] * 4])
    given = {"input_features": features, "labels": torch.tensor([[5, 3]]), "attention_mask": mask}
    assert torch.equal(examples_of(model, given)[0].inputs["input_features"], features)


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
        examples_of(moonshine()[0], {"input_values": torch.randn(1, 3), "labels": torch.tensor([[5]]), **more})
