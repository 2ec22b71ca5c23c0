"""Recordings as calibration data: lists of WAV files with transcripts, stored features, and what is wrong with them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import tokenizer
from safetensors.torch import save_file
from speech import TEXTS, extractor, sweep, write_model, write_recordings, write_wave
from transformers import AutoModelForSpeechSeq2Seq, WhisperTokenizer

from compress.data.ids import check_text, model_sample
from compress.data.text_source import TextSource
from compress.errors import CalibrationError
from compress.models.kinds.speech import RecordingReader

TARGETS = [[*(int(word[1:]) for word in text.split()), 3] for text in TEXTS]
"""The words and the end; the token before them is that with which the decoder starts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return AutoModelForSpeechSeq2Seq.from_pretrained(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    return write_recordings(tmp_path_factory.mktemp("recordings"))


@pytest.fixture
def lines(tmp_path):
    """lines(*objects) -> the path of a list of them, next to one.wav."""
    write_wave(tmp_path / "one.wav", sweep())

    def write(*objects):
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in objects)
        (tmp_path / "list.jsonl").write_text(text, encoding="utf-8")
        return str(tmp_path / "list.jsonl")

    return write


def sample(model, source, part="calibration", count=None, length=None, seed=0, known=None):
    return model_sample(model, known or tokenizer(), source, part, count, length, seed)


def tokens(ids):
    return [example.labels[0].tolist() for example in ids]


def features(ids):
    return torch.cat([example.inputs["input_features"] for example in ids])


def test_examples_hold_features_and_targets(model, listed):
    ids, use = sample(model, listed, "test", 6)
    assert tokens(ids) == TARGETS
    wanted = extractor()(sweep(0.5, first=600.0, last=4000.0), sampling_rate=16000, return_tensors="pt").input_features
    torch.testing.assert_close(features(ids)[2], wanted[0], rtol=0, atol=1e-3)  # 16 bits of a WAV file
    assert (use.sequences, use.length, use.documents, use.tokens) == (6, 6, 6, 26)


def test_which_recordings_are_taken(model, listed):
    """The test part takes the first ones, and all of fewer; the calibration part draws by its seed."""
    assert tokens(sample(model, listed, "test", 2)[0]) == TARGETS[:2]
    assert len(sample(model, listed, "test", 16)[0]) == 6
    drawn = [tokens(sample(model, listed, count=3, seed=seed)[0]) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and all(each in TARGETS for each in drawn[0])
    with pytest.raises(
        CalibrationError, match=r"list.jsonl holds 6 recordings, but sequences is 7; use sequences <= 6"
    ):
        sample(model, listed, count=7)


def test_a_transcript_is_cut_to_the_length(model, listed):
    assert tokens(sample(model, listed, "test", length=3)[0]) == [target[:3] for target in TARGETS]


def test_a_list_in_json_and_another_column(model, listed, tmp_path):
    rows = [json.loads(line) for line in Path(listed).read_text().splitlines()]
    named = [{"audio": str(Path(listed).parent / row["audio"]), "sentence": row["text"]} for row in rows]
    (tmp_path / "list.json").write_text(json.dumps(named))
    found, _ = sample(model, TextSource(source=str(tmp_path / "list.json"), column="sentence"), "test")
    assert found.sha256() == sample(model, listed, "test")[0].sha256()


def test_stored_features(model, tmp_path):
    made, labels = torch.randn(3, 8, 24), torch.tensor([[5, 6, 3], [7, 3, -100], [8, 9, 3]])
    save_file({"input_features": made, "labels": labels}, tmp_path / "a.safetensors")
    ids, use = sample(model, str(tmp_path / "a.safetensors"), count=2)
    assert torch.equal(features(ids), made[:2]) and tokens(ids) == [[5, 6, 3], [7, 3]]
    assert (use.sequences, use.length) == (2, 3)
    assert tokens(sample(model, str(tmp_path / "a.safetensors"), "test", 9, 2)[0]) == [[5, 6], [7, 3], [8, 9]]


def test_a_line_chooses_the_language_and_the_task(model, lines):
    """The tokens before a transcript are those that the tokenizer of Whisper puts there."""
    words = [
        "<|endoftext|>",
        "<|startoftranscript|>",
        "<|en|>",
        "<|zh|>",
        "<|de|>",
        "<|translate|>",
        "<|transcribe|>",
        "<|notimestamps|>",
    ]
    vocabulary = {word: i for i, word in enumerate([*words, "a", "b"])}
    known = WhisperTokenizer(vocab=vocabulary, merges=[], additional_special_tokens=words[1:])
    name = known.convert_ids_to_tokens
    reader = RecordingReader(model, known, "text", Path(lines({})).parent, extractor())
    plain = reader.example({"audio": "one.wav", "text": "ab"}, "here", None)
    told = reader.example({"audio": "one.wav", "text": "ab", "language": "german", "task": "translate"}, "here", None)
    assert name(tokens([told])[0])[-6:] == [
        "<|de|>",
        "<|translate|>",
        "<|notimestamps|>",
        "a",
        "b",
        "<|endoftext|>",
    ]
    assert "<|de|>" not in name(tokens([plain])[0])
    assert "<|de|>" not in name(tokens([reader.example({"audio": "one.wav", "text": "ab"}, "here", None)])[0])
    again = {"audio": "one.wav", "text": "b", "language": "german", "task": "translate"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(known), "__deepcopy__", None, raising=False)  # it is copied once for both lines
        assert "<|de|>" in name(tokens([reader.example(again, "here", None)])[0])
    with pytest.raises(CalibrationError, match="list.jsonl:1: language: "):
        reader.example({"audio": "one.wav", "text": "ab", "language": "klingon"}, "list.jsonl:1", None)


ONE = {"audio": "one.wav", "text": "w5 w6"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            {**ONE, "audio": "two.wav"},
            r"cannot read .*two.wav.: No such file or directory; write the path of a WAV file",
        ),
        ({**ONE, "audio": "list.jsonl"}, r"list.jsonl is no WAV file of integers or floats .*; write it as WAV"),
        ({**ONE, "text": " "}, "text is blank; write what is said, or leave the line out"),
        ({"audio": "one.wav"}, r"no text in the column text \(columns: audio\); write .*audio"),
        ({"text": "w5"}, r"no text in the column audio \(columns: text\); write"),
        ("[1]", "no recording, but list; write"),
        ("{", "not JSON"),
        (
            {**ONE, "text": "w5 " * 40},
            "its transcript has 41 tokens, but the decoder has 32 positions; cut the recording",
        ),
        ({**ONE, "language": "en"}, "the tokenizer has no tokens for language; leave them out"),
    ],
)
def test_a_wrong_line(line, said, model, lines):
    with pytest.raises(CalibrationError, match=f"list.jsonl:2: .*{said}"):
        sample(model, lines(ONE, line), "test")


def test_a_recording_that_is_too_long(model, lines, tmp_path):
    write_wave(tmp_path / "two.wav", sweep(1.5))
    with pytest.raises(CalibrationError, match=r"two.wav is 1.5 seconds long, but the model hears 1; cut it"):
        sample(model, lines({**ONE, "audio": "two.wav"}), "test")


def test_another_number_of_bins(model, lines, tmp_path):
    """By the files of another model: of its feature extractor, or features that it made."""
    folder = write_model(tmp_path / "other")
    extractor(feature_size=16).save_pretrained(folder)
    said = (
        r"features of shape \[16, 24\], but Whisper.* reads 8 bins and 24 frames; make them with the feature extractor"
    )
    with pytest.raises(CalibrationError, match=f"list.jsonl:1: has {said}"):
        sample(AutoModelForSpeechSeq2Seq.from_pretrained(folder), lines(ONE), "test")
    save_file({"input_features": torch.zeros(1, 16, 24), "labels": torch.ones(1, 2).long()}, tmp_path / "a.safetensors")
    with pytest.raises(CalibrationError, match=f"a.safetensors: recording 0: has {said}"):
        sample(model, str(tmp_path / "a.safetensors"), "test")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"labels": torch.ones(1, 2).long()}, r"holds labels; give input_features \(or input_values\) and labels"),
        ({"input_features": torch.zeros(2, 8, 24)}, "holds input_features; give"),
        ({"input_features": torch.zeros(2, 8, 24), "labels": torch.ones(1, 2).long()}, "do not belong together; write"),
        ({"input_features": torch.zeros(1, 8, 24), "labels": torch.ones(1, 2)}, "do not belong together; write"),
        (
            {"input_features": torch.full((1, 8, 24), np.nan), "labels": torch.ones(1, 2).long()},
            "holds NaN or infinity",
        ),
        (
            {"input_features": torch.zeros(1, 8, 24), "labels": torch.full((1, 2), -100)},
            r"labels\[0\] is no transcript",
        ),
        (
            {"input_features": torch.zeros(1, 8, 24), "labels": torch.tensor([[-100, 5]])},
            r"labels\[0\] has -100, .* before",
        ),
        (
            {"input_features": torch.zeros(1, 8, 24), "labels": torch.tensor([[64]])},
            "the token id 64, but the model's voc",
        ),
    ],
)
def test_wrong_stored_features(given, said, model, tmp_path):
    save_file(given, tmp_path / "a.safetensors")
    with pytest.raises(CalibrationError, match=f"a.safetensors: .*{said}"):
        sample(model, str(tmp_path / "a.safetensors"), "test")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"source": "embedded"},
            "transcribes recordings, and embedded holds none; write calibration: {source: FILE.jsonl}",
        ),
        ({"source": "self"}, "transcribes recordings, and self holds none"),
        ({"dataset": "some/set"}, "and some/set holds none"),
        ({"source": "missing.jsonl"}, "cannot read missing.jsonl: No such file or directory; write the path of a file"),
        ({"source": "missing.safetensors"}, "cannot read missing.safetensors"),
        (
            {"source": "missing.jsonl", "packing": False},
            "packing has no effect: .* transcribes recordings; leave it out",
        ),
        ({"source": "missing.jsonl", "bos": True}, "bos has no effect"),
    ],
)
def test_what_the_plan_refuses(options, said, model):
    with pytest.raises(CalibrationError, match=f"calibration: .*{said}"):
        check_text(model, tokenizer(), TextSource(**options), "calibration", 4, 512)


def test_a_model_without_tokenizer_or_extractor(model, listed, tmp_path):
    with pytest.raises(
        CalibrationError, match=r"the model has no tokenizer; add it, or use features in a .safetensors"
    ):
        check_text(model, None, TextSource(source=listed), "calibration", 4, 512)
    folder = Path(write_model(tmp_path / "bare"))
    (folder / "preprocessor_config.json").unlink()
    bare = AutoModelForSpeechSeq2Seq.from_pretrained(folder)
    with pytest.raises(
        CalibrationError, match=r"feature extractor .* cannot be read .*; add its preprocessor_config.json"
    ):
        check_text(bare, tokenizer(), TextSource(source=listed), "calibration", 4, 512)
    (tmp_path / "a.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CalibrationError, match=r"a.safetensors is no .safetensors file .*; write it with safetensors"):
        sample(model, str(tmp_path / "a.safetensors"))


def test_an_empty_list(model, lines):
    with pytest.raises(CalibrationError, match="holds no recordings; write a line"):
        sample(model, lines(), "test")
