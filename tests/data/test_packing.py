"""From documents to sequences: joined and cut, or one document per sequence; limits per document; .json files."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from compress.data.ids import sample, token_ids
from compress.data.sources import read_texts
from compress.data.text_source import TextSource
from compress.errors import CalibrationError
from compress.numerics.budget import shares

DOCUMENTS = ["one two three four five six seven", "eight", "nine ten eleven twelve thirteen", "a b c d e f g h i j"]


@pytest.fixture(scope="module")
def tokenizer(pico):
    return AutoTokenizer.from_pretrained(pico)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS), encoding="utf-8")
    return str(path)


def by_hand(tokenizer):
    """The ids of each document."""
    return [tokenizer(text, add_special_tokens=False).input_ids for text in DOCUMENTS]


def test_one_document_per_sequence(tokenizer, rows):
    whole = by_hand(tokenizer)
    length = sorted(map(len, whole))[1]  # all but the shortest fill a sequence
    wanted = [ids[:length] for ids in whole if len(ids) >= length]
    ids, use = sample(TextSource(source=rows, packing=False), "test", tokenizer, None, length, 0)
    assert len(wanted) == 3 and ids.tolist() == wanted
    assert (use.documents, use.packing, use.tokens) == (4, False, sum(map(len, whole)))
    drawn = [
        token_ids(TextSource(source=rows, packing=False), "calibration", tokenizer, 2, length, s) for s in (0, 0, 3)
    ]
    assert torch.equal(drawn[0], drawn[1]) and all(row in wanted for row in drawn[2].tolist())


def test_long_documents_are_cut_before_they_are_joined(tokenizer, rows):
    end = tokenizer.eos_token_id
    stream = []
    for ids in by_hand(tokenizer):
        stream += ([end] if stream else []) + ids[:3]
    source = TextSource(source=rows, max_tokens_per_document=3)
    ids, use = sample(source, "test", tokenizer, None, 5, 0)
    assert ids.flatten().tolist() == stream[: len(stream) // 5 * 5]
    assert (use.tokens, use.max_tokens_per_document) == (len(stream), 3)


def test_the_default_is_the_stream_of_all_documents(tokenizer, rows):
    end = tokenizer.eos_token_id
    stream = [token for ids in by_hand(tokenizer) for token in [end, *ids]][1:]
    assert token_ids(rows, "test", tokenizer, None, 4, 0).flatten().tolist() == stream[: len(stream) // 4 * 4]


def test_too_few_documents_fill_a_sequence(tokenizer, rows):
    with pytest.raises(CalibrationError, match=r"0 of the 4 documents of .*rows.jsonl have 500 tokens or more"):
        token_ids(TextSource(source=rows, packing=False), "calibration", tokenizer, 1, 500, 0)
    with pytest.raises(CalibrationError, match=r"sequences is 5; use a shorter length, fewer sequences, packing: true"):
        token_ids(TextSource(source=rows, packing=False), "calibration", tokenizer, 5, 3, 0)


@pytest.mark.parametrize(
    ("weights", "total", "counts"),
    [
        ([2, 1], 9, [6, 3]),
        ([2, 1], 8, [5, 3]),  # 5.33 and 2.67
        ([1, 1], 3, [2, 1]),
        ([0.5, 0.25, 0.25], 5, [3, 1, 1]),  # 2.5, 1.25, 1.25
        ([1, 99], 10, [0, 10]),
        ([3], 7, [7]),
    ],
)
def test_shares_by_the_largest_remainder(weights, total, counts):
    assert shares(weights, total) == counts


def test_a_json_file_is_a_list_of_rows(tmp_path):
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "Hi", "output": "Ho"}, {"text": "x"}]), encoding="utf-8")
    found = read_texts(str(path), "calibration")
    assert found.documents == ["user: Hi\nassistant: Ho", "x"] and found.forms == ("instruction", "text")
    path.write_text('{"a": 1}')
    with pytest.raises(CalibrationError, match="alpaca.json: not a list but dict; write a list of objects"):
        read_texts(str(path), "calibration")
    path.write_text("[1,")
    with pytest.raises(CalibrationError, match="alpaca.json:1: not JSON"):
        read_texts(str(path), "calibration")
    path.write_text('[{"id": 1}]')
    with pytest.raises(CalibrationError, match=r"alpaca.json\[0\]: no text in the columns id"):
        read_texts(str(path), "calibration")


def test_bytes_of_known_texts_do_not_change(tokenizer):
    """The same ids for a name alone and for all options at their defaults."""
    one = token_ids("embedded", "calibration", tokenizer, 4, 32, 7)
    assert torch.equal(one, token_ids(TextSource(source="embedded"), "calibration", tokenizer, 4, 32, 7))
