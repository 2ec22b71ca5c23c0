"""Sequences that begin with the tokens that a tokenizer adds before a text."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import ids_of
from encoders import tokenizer as tokenizer_of_words
from encoders import write_words
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from compress.data.ids import model_sample, windows
from compress.data.self_sampling import Sampling, self_sampled
from compress.data.text_source import TextSource
from compress.errors import CalibrationError
from compress.evaluation.windows import evaluation_examples
from compress.pipeline.texts import calibration_examples
from compress.report.sections.reproduction import described


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return write_words(tmp_path_factory.mktemp("words") / "words.txt", 200)


@pytest.fixture(scope="module")
def tokenizer():
    """It adds [CLS], 2, before a text (and [SEP] after it); its beginning-of-sequence token is w5."""
    return tokenizer_of_words(bos_token="w5")


def text_of(words, tokenizer):
    return tokenizer(Path(words).read_text(encoding="utf-8"), add_special_tokens=False).input_ids


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60), length=st.integers(3, 9), prefix=st.lists(st.just(0), max_size=2)
)
def test_windows_begin_with_the_prefix_once(tokens, length, prefix):
    cut = windows(torch.tensor(tokens, dtype=torch.int64), length, prefix).tolist()
    at = 0
    for row in cut:
        added = [] if tokens[at : at + len(prefix)] == prefix else prefix
        assert row == [*added, *tokens[at : at + length - len(added)]] and row[: len(prefix)] == prefix
        at += length - len(added)
    left = tokens[at:]
    assert len(left) < length - (0 if left[: len(prefix)] == prefix else len(prefix))


def test_a_sequence_begins_as_the_tokenizer_begins_a_text(tiny, words, tokenizer):
    text, model = text_of(words, tokenizer), tiny("llama")
    found, use = model_sample(model, tokenizer, words, "test", 3, 10)
    assert ids_of(found).tolist() == [[2, *text[9 * i : 9 * i + 9]] for i in range(3)] and use.bos
    for bos, first in ((True, [5]), (False, [])):
        found, use = model_sample(model, tokenizer, TextSource(source=words, bos=bos), "test", 2, 10)
        own = 10 - len(first)
        assert ids_of(found).tolist() == [[*first, *text[own * i : own * i + own]] for i in range(2)] and use.bos == bos


def test_documents_that_begin_with_it_do_not_get_it_twice(tiny, tokenizer, tmp_path):
    rows = tmp_path / "rows.jsonl"
    texts = ["[CLS] w7 w8 w9 w10", "w11 w12 w13 w14"]
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    source = TextSource(source=str(rows), packing=False)
    assert ids_of(model_sample(tiny("llama"), tokenizer, source, "test", None, 4)[0]).tolist() == [
        [2, 7, 8, 9],
        [2, 11, 12, 13],
    ]
    joined = TextSource(source=str(rows))
    assert ids_of(model_sample(tiny("llama"), tokenizer, joined, "test", None, 5)[0]).tolist() == [
        [2, 7, 8, 9, 10],
        [2, 11, 12, 13, 14],
    ]
    exact = TextSource(source=str(rows), packing=False, max_tokens_per_document=4)
    found, _ = model_sample(tiny("llama"), tokenizer, exact, "test", None, 5)
    assert ids_of(found).tolist() == [[2, 11, 12, 13, 14]]  # four tokens of the document and the one before them


def test_overlapping_windows_have_it_too(tiny, words, tokenizer):
    text = text_of(words, tokenizer)
    ids, use = evaluation_examples(tiny("llama"), tokenizer, words, 3, 10, stride=4)
    assert ids_of(ids).tolist() == [[2, *text[4 * i : 4 * i + 9]] for i in range(3)] and use.bos
    two = tokenizer_of_words()
    two.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] [SEP] $A", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    with pytest.raises(CalibrationError, match="stride 9 is longer than the text of a window; use stride <= 8"):
        evaluation_examples(tiny("llama"), two, words, 3, 10, stride=9)


def test_sampled_text_begins_with_it(pico_model, pico):
    known = AutoTokenizer.from_pretrained(pico)
    ids = self_sampled(pico_model, known, 3, 12, 0, Sampling(prefix=[1]))
    assert ids.shape == (3, 12) and ids[:, 0].tolist() == [1, 1, 1]
    assert self_sampled(pico_model, known, 2, 1, 0, Sampling(prefix=[1])).tolist() == [[1], [1]]


def test_a_recipe_calibrates_with_it(recipe, in_memory, tiny, words, tokenizer):
    opened = replace(in_memory(tiny("llama")), tokenizer=tokenizer)
    ids, (use,) = calibration_examples(
        recipe({"rtn": {}}, calibration={"source": words, "sequences": 4, "length": 16}), opened
    )
    assert ids_of(ids)[:, 0].tolist() == [2] * 4 and "begins with the beginning-of-sequence token" in described(use)


@pytest.mark.parametrize(
    ("family", "names", "bos", "length", "message"),
    [
        ("llama", {}, True, 8, "test: bos: the tokenizer has no beginning-of-sequence token; leave bos out"),
        ("bert", {}, False, 8, "test: bos has no effect: .*; leave it out"),
        ("llama", {}, None, 1, "eval: length 1 has no room for text next to the special tokens"),
    ],
)
def test_bad_input(family, names, bos, length, message, tiny, words):
    with pytest.raises(CalibrationError, match=message):
        model_sample(tiny(family), tokenizer_of_words(**names), TextSource(source=words, bos=bos), "test", 2, length)
