"""The text of a training as a stream: what is read and tokenized, by which process, and from which position."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from encoders import VOCAB
from encoders import tokenizer as word_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from compress.data.dataset_rows import AT_ONCE, RowStream
from compress.data.ids import model_sample, sample
from compress.data.sources import read_texts
from compress.data.text_source import TextSource
from compress.data.training_text import TrainingText
from compress.errors import CalibrationError

FILES, ROWS, LENGTH = 12, 20, 64


def text_of(name: str, row: int) -> str:
    return f"file {name} row {row} " + " ".join(f"w{(len(name) * 31 + row * 7 + i) % 97}" for i in range(60))


def written(place: Path, form: str, names: list[str], rows: int = ROWS) -> Path:
    place.mkdir(parents=True)
    for name in names:
        data = datasets.Dataset.from_list([{"text": text_of(name, row)} for row in range(rows)])
        data.to_parquet(place / f"{name}.parquet") if form == "parquet" else data.to_json(place / f"{name}.jsonl")
    return place


@pytest.fixture(scope="module", params=["parquet", "jsonl"])
def folder(request, tmp_path_factory) -> Path:
    """A folder of many files."""
    return written(tmp_path_factory.mktemp("many") / "texts", request.param, [f"f{file}" for file in range(FILES)])


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory) -> Path:
    """A data set that `save_to_disk` wrote, whose rows can be read in any order."""
    place = tmp_path_factory.mktemp("disk") / "texts"
    datasets.Dataset.from_list([{"text": text_of("disk", row)} for row in range(100)]).save_to_disk(place)
    return place


class Counting:
    """A tokenizer that counts the texts and the characters that it tokenizes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.texts, self.characters = tokenizer, [], 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, **options):
        texts = [text] if isinstance(text, str) else list(text)
        self.texts += texts
        self.characters += sum(map(len, texts))
        return self.tokenizer(text, **options)


@pytest.fixture(scope="module")
def model(pico):
    return AutoModelForCausalLM.from_pretrained(pico)


@pytest.fixture
def tokenizer(pico):
    return Counting(AutoTokenizer.from_pretrained(pico))


def source(folder: Path, **options) -> TextSource:
    return TextSource(dataset=str(folder), streaming=True, split="train", **options)


@pytest.fixture
def text(model, tokenizer):
    def of(*sources: TextSource, weights=None, length=LENGTH, seed=0) -> TrainingText:
        return TrainingText(sources, weights or (1.0,) * len(sources), model, tokenizer, 8, length, seed)

    return of


def ids(stream, count: int, first: int = 0) -> torch.Tensor:
    return torch.cat([example.inputs["input_ids"] for example in stream.examples(range(first, first + count))])


@pytest.mark.parametrize("options", [{}, {"packing": False}, {"bos": True}, {"max_tokens_per_document": 40}])
def test_the_sequences_are_those_of_the_calibration(folder, text, tokenizer, options):
    """The oracle reads the same stream at once."""
    if "bos" in options and tokenizer.bos_token_id is None:
        tokenizer.tokenizer.bos_token = tokenizer.eos_token
    prefix = [tokenizer.bos_token_id] if "bos" in options else ()
    stream = text(source(folder, **options)).opened()
    expected, _ = sample(source(folder, **options), "calibration", tokenizer, 20, LENGTH, 0, prefix)
    assert torch.cat([ids(stream, 1, number) for number in range(20)]).equal(expected)


def test_only_what_the_steps_need_is_tokenized(folder, text, tokenizer):
    stream = text(source(folder)).opened()
    assert set(tokenizer.texts) <= {"a"}  # which shows the special tokens
    tokenizer.texts.clear()
    ids(stream, 4)
    first = len(tokenizer.texts)
    assert 0 < first < 30
    ids(stream, 20, 4)
    use = stream.uses()[0]
    assert use["sequences"] == 24 and use["documents"] == len(tokenizer.texts) < FILES * ROWS / 2
    assert 24 * LENGTH <= use["tokens"] < 24 * LENGTH + 4096
    assert len(set(tokenizer.texts)) == len(tokenizer.texts)


@pytest.mark.parametrize("taken", [1, 7, 40])
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_stored_position_goes_on_with_the_same_sequences(folder, on_disk, text, tokenizer, is_saved, taken):
    texts = text(source(on_disk if is_saved else folder))
    whole = ids(texts.opened(), taken + 30)
    stream = texts.opened()
    ids(stream, taken)
    state = [dict(position) for position in stream.state()]
    unused = [position.pop("unused") for position in state]
    state = json.loads(json.dumps(state))
    states = [{**position, "unused": tokens} for position, tokens in zip(state, unused, strict=True)]
    read_before = set(tokenizer.texts[len(tokenizer.texts) - stream.uses()[0]["documents"] :])
    begun = len(tokenizer.texts)
    again = texts.opened()
    again.resume(states)
    assert ids(again, 30, taken).equal(whole[taken:])
    if taken + 30 < 50:  # in the first round
        assert not read_before & set(tokenizer.texts[begun:])
    ids(stream, 30, taken)
    assert again.uses() == stream.uses() and len({use["sha256"] for use in again.uses()}) == 1


def test_a_position_inside_of_a_file_is_exact(tmp_path):
    """Of a file whose rows are stored in several groups, after any number of stops."""
    place = tmp_path / "groups"
    place.mkdir()
    rows = [f"row {row}" for row in range(50)]
    pq.write_table(pa.table({"text": rows}), place / "a.parquet", row_group_size=7)
    read, position = [], RowStream(source(place), 0).state()
    while len(read) < len(rows):
        stream = RowStream(source(place), 0)
        stream.resume(position)
        read += [row["text"] for row in islice(stream, 3)]
        position = json.loads(json.dumps(stream.state()))
    assert read == rows


def rows_of(folder: Path, rank: int, processes: int, **options) -> list[str]:
    return [row["text"] for row in RowStream(source(folder, **options), 3, rank, processes)]


@pytest.mark.parametrize("processes", [2, 3, 5, 12])
def test_processes_read_different_files(folder, processes):
    """Also where the files cannot be divided into equal shares."""
    parts = [rows_of(folder, rank, processes) for rank in range(processes)]
    files = [{row.split()[1] for row in part} for part in parts]
    assert sum(map(len, files)) == FILES and len(set().union(*files)) == FILES
    assert sorted(row for part in parts for row in part) == sorted(rows_of(folder, 0, 1))
    assert parts == [rows_of(folder, rank, processes) for rank in range(processes)]


@pytest.mark.parametrize("processes", [2, 30])
def test_processes_share_the_rows_of_too_few_files(folder, on_disk, processes):
    place = on_disk if processes == 2 else folder
    parts = [rows_of(place, rank, processes) for rank in range(processes)]
    assert sorted(row for part in parts for row in part) == sorted(rows_of(place, 0, 1))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("processes", [1, 2, 30])
def test_the_limit_of_rows_is_that_of_all_processes(folder, processes):
    parts = [rows_of(folder, rank, processes, max_documents=41) for rank in range(processes)]
    assert sum(map(len, parts)) == 41


@pytest.mark.parametrize("processes", [2, 30])
def test_every_process_goes_on_at_its_position(folder, text, processes):
    texts = text(source(folder))
    for rank in (0, processes - 1):
        whole, stream = ids(texts.opened(rank, processes), 9), texts.opened(rank, processes)
        ids(stream, 4)
        again = texts.opened(rank, processes)
        again.resume(stream.state())
        assert ids(again, 5).equal(whole[4:])


def test_a_stream_that_ends_begins_again_with_its_files_in_another_order(folder, text):
    rows = RowStream(source(folder), 3)
    first = [row["text"] for row in rows]
    rows.begin_again()
    second = [row["text"] for row in rows]
    assert sorted(first) == sorted(second) and first != second
    stream = text(source(folder, max_documents=5)).opened()
    assert stream.rounds == {source(folder).label: 0}
    ids(stream, 30)
    assert stream.rounds[source(folder).label] >= 2 and stream.uses()[0]["rounds"] >= 3


def test_a_mixture_has_the_shares_of_its_weights_in_every_part(folder, on_disk, text, tokenizer):
    sources = source(folder, packing=False), source(on_disk, packing=False)
    texts = text(*sources, weights=(3.0, 1.0))
    stream = texts.opened()
    for first in range(0, 80, 16):
        rows = ids(stream, 16, first)
        of_disk = sum("disk" in tokenizer.decode(row) for row in rows)
        assert 3 <= of_disk <= 5
    assert [use["sequences"] for use in stream.uses()] == [60, 20]
    assert ids(texts.opened(), 16).equal(ids(texts.opened(), 16))
    other = text(*sources, weights=(3.0, 1.0), seed=1)
    assert not ids(other.opened(), 16).equal(ids(texts.opened(), 16))


def test_processes_choose_the_texts_of_a_mixture_together(folder, on_disk, text):
    texts = text(source(folder), source(on_disk), weights=(3.0, 1.0))
    counts = Counter()
    for rank in range(4):
        stream = texts.opened(rank, 4)
        stream.examples(range(rank, 80, 4))
        for use in stream.uses():
            counts[use["text"]] += use["sequences"]
    assert sorted(counts.values()) == [20, 60]


def test_documents_that_are_held_out_are_not_trained_on(folder, text, tokenizer):
    texts = text(source(folder, packing=False))
    held_out = texts.held_out(0.25)
    assert len(held_out) == 2
    documents = read_texts(source(folder), "calibration").documents
    stream, starts = texts.opened(hold_out=0.25), set()
    while not stream.rounds[source(folder).label]:
        starts |= {tokenizer.decode(row[:16]) for row in ids(stream, 4)}
    assert 0.6 < len(starts) / len({tokenizer.decode(tokenizer(d).input_ids[:16]) for d in documents}) < 0.9
    assert not starts & {tokenizer.decode(example.inputs["input_ids"][0, :16]) for example in held_out}


def test_a_divided_stream_has_no_documents_of_the_evaluation(folder, text, tokenizer):
    texts = text(source(folder, packing=False, divided=True))
    evaluated, _ = sample(source(folder, packing=False, divided=True), "test", tokenizer, None, LENGTH, 0)
    stream, starts = texts.opened(), set()
    while not stream.rounds[source(folder).label]:
        starts |= {tuple(row[:16].tolist()) for row in ids(stream, 4)}
    assert starts and not starts & {tuple(row[:16].tolist()) for row in evaluated}


def test_a_long_document_is_tokenized_once(tmp_path, text, tokenizer):
    place = tmp_path / "long"
    place.mkdir()
    long = " ".join(f"w{i % 1013}" for i in range(60_000))
    datasets.Dataset.from_list([{"text": long}, {"text": "the end " * 50}]).to_json(place / "a.jsonl")
    texts = text(source(place))
    stream = texts.opened()
    expected, _ = sample(source(place), "calibration", tokenizer, 50, LENGTH, 0)
    tokenizer.characters = 0
    parts = [ids(stream, 10)]
    for first in range(10, 50, 10):
        again = texts.opened()
        again.resume(stream.state())
        parts.append(ids(again, 10, first))
        stream = again
    assert torch.cat(parts).equal(expected) and tokenizer.characters < 1.2 * len(long)


def test_a_stream_without_a_sequence_says_so(folder, text, tmp_path):
    with pytest.raises(
        CalibrationError, match="has 240 documents and no sequence of 100000 tokens; use a shorter length"
    ):
        ids(text(source(folder), length=100_000).opened(), 1)
    with pytest.raises(CalibrationError, match=r"the part of process 11 of the stream .* has 20 documents"):
        ids(text(source(folder), length=20_000).opened(11, 12), 1)
    with pytest.raises(CalibrationError, match="no sequence of 5000 tokens"):
        ids(text(source(folder, packing=False), length=5000).opened(), 1)
    empty = written(tmp_path / "empty", "jsonl", ["a"], 1)
    (empty / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(CalibrationError, match="has 0 documents"):
        ids(text(source(empty)).opened(), 1)


def test_several_files_are_read_at_once(folder):
    rows = [row.split()[1] for row in rows_of(folder, 0, 1)]
    assert len(set(rows[:AT_ONCE])) == AT_ONCE


def paired_model() -> T5ForConditionalGeneration:
    sizes = {"d_model": 16, "d_ff": 24, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes))


@pytest.mark.parametrize("kind", ["masked", "paired"])
def test_models_of_other_kinds_read_the_examples_of_the_calibration(tmp_path, kind):
    """Sequences stand between special tokens, or are cut into a source and a target."""
    place = written(tmp_path / "texts", "jsonl", ["a", "b"])
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = paired_model() if kind == "paired" else BertForMaskedLM(BertConfig(vocab_size=VOCAB, **sizes))
    words = word_tokenizer()
    expected, _ = model_sample(model, words, source(place), "calibration", 5, 24, 0)
    stream = TrainingText((source(place),), (1.0,), model, words, 8, 24, 0).opened()
    assert stream.examples(range(5)).sha256() == expected.sha256()
