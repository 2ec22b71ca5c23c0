"""The corpus: a fixed split, deterministic ids, and an error for each thing a user can get wrong."""

import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from huggingface_hub.errors import HTTPError
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.data import ids as ids_of
from compress.data import installed_texts, self_sampling, sources
from compress.data.text_source import Part, TextSource
from compress.data.tokenization import token_stream
from compress.errors import CalibrationError
from compress.models.kinds.batch import Examples

PICO = Path(__file__).parents[1] / "pico" / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(PICO)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(PICO)


# ---- the embedded text ----


def test_both_parts_have_text():
    sizes = {part: sum(map(len, installed_texts.embedded_text(part))) for part in ("calibration", "test")}
    assert 0.15 < sizes["test"] / sum(sizes.values()) < 0.30


def test_no_paragraph_of_the_test_part_is_in_the_calibration_part():
    def paragraphs(part: Part) -> set[str]:
        return {" ".join(p.split()) for text in installed_texts.embedded_text(part) for p in text.split("\n\n")} - {""}

    assert len(paragraphs("test")) > 300
    assert paragraphs("test").isdisjoint(paragraphs("calibration"))


@pytest.mark.parametrize(("topic", "is_test"), [("assignment", True), ("comparisons", False)])
def test_the_split_is_fixed(topic, is_test):
    assert (topics[topic] in installed_texts.embedded_text("test")) is is_test


def test_text_hash_follows_the_bounds_of_the_documents():
    assert sources.text_sha256(["ab", "c"]) != sources.text_sha256(["a", "bc"])
    assert sources.text_sha256(["a", "b"]) == sources.text_sha256(("a", "b"))


# ---- windows and ids ----


@given(tokens=st.integers(0, 300), length=st.integers(1, 60))
def test_windows_are_the_stream_in_order_without_overlap(tokens, length):
    cut = ids_of.windows(torch.arange(tokens), length)
    assert cut.shape == (tokens // length, length)
    assert cut.flatten().tolist() == list(range(tokens // length * length))


@given(data=st.data(), length=st.integers(1, 30), seed=st.integers(0, 2**31))
def test_calibration_draws_whole_windows_once(data, length, seed):
    stream = torch.arange(200)
    cut = ids_of.windows(stream, length)
    sequences = data.draw(st.integers(1, len(cut)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids_of, "read_pieces", lambda *_: iter(()))
        patch.setattr(ids_of, "encode", lambda *_: iter([(0, stream.tolist())]))
        tokenizer = SimpleNamespace(eos_token_id=None)
        ids = ids_of.token_ids("embedded", "calibration", tokenizer, sequences, length, seed)
    assert ids.shape == (sequences, length)
    assert len(ids.unique()) == sequences * length
    assert {tuple(row) for row in ids.tolist()} <= {tuple(row) for row in cut.tolist()}


def test_calibration_examples_depend_on_the_seed_alone(tokenizer):
    first, again, other = (ids_of.token_ids("embedded", "calibration", tokenizer, 8, 64, seed) for seed in (1, 1, 2))
    assert first.dtype == torch.int64
    assert torch.equal(first, again)
    assert Examples.of_ids(first).sha256() == Examples.of_ids(again).sha256() != Examples.of_ids(other).sha256()


def test_test_ids_are_the_text_from_its_start(tokenizer):
    few = ids_of.token_ids("embedded", "test", tokenizer, 3, 64, seed=5)
    every = ids_of.token_ids("embedded", "test", tokenizer, None, 64, seed=6)
    assert torch.equal(few, every[:3])
    assert installed_texts.embedded_text("test")[0].startswith(tokenizer.decode(few[0]))


def test_documents_are_joined_by_the_end_token(tokenizer):
    a, b, end = tokenizer("one text").input_ids, tokenizer("two").input_ids, tokenizer.eos_token_id
    assert token_stream(["one text", "two"], tokenizer).tolist() == [*a, end, *b]
    plain = AutoTokenizer.from_pretrained(PICO)
    plain.eos_token = None
    assert token_stream(["one text", "two"], plain).tolist() == [*a, *b]
    assert token_stream([], tokenizer).tolist() == []


def test_long_documents_are_tokenized_without_a_warning(caplog, monkeypatch):
    fresh = AutoTokenizer.from_pretrained(PICO)  # transformers warns once per tokenizer
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    ids = token_stream(["word " * 5 * fresh.model_max_length], fresh)
    assert len(ids) > fresh.model_max_length
    assert not caplog.records


def test_ids_hash_is_that_of_little_endian_int64():
    assert (
        Examples.of_ids(torch.tensor([[1, 2]])).sha256()
        == Examples.of_ids(torch.tensor([[1, 2]], dtype=torch.int32)).sha256()
    )
    assert Examples.of_ids(torch.tensor([[1]])).sha256() == hashlib.sha256(b"\1" + b"\0" * 7).hexdigest()


@pytest.mark.parametrize(
    ("sequences", "length", "message"),
    [
        (0, 64, "calibration: sequences is 0; use 1 or more"),
        (4, 0, "calibration: length is 0; use 1 or more"),
        (4, None, "calibration: length is missing; embedded text needs one"),
        (10_000, 1000, r"has \d+ sequences of 1000 tokens, but sequences is 10000; use sequences <= \d+,"),
        (1, 10_000_000, r"embedded text has \d+ tokens, fewer than one sequence of 10000000; use a shorter"),
        (None, 10_000_000, "fewer than one sequence"),
    ],
)
def test_impossible_shapes(tokenizer, sequences, length, message):
    with pytest.raises(CalibrationError, match=message):
        ids_of.token_ids("embedded", "calibration", tokenizer, sequences, length, seed=0)


def test_a_text_of_fewer_windows_is_measured_whole(tokenizer):
    """So that the number of windows of a suite suits texts of any size; `Sample.use` says how many there were."""
    every, _ = ids_of.sample("embedded", "test", tokenizer, None, 1000, 0)
    found, use = ids_of.sample("embedded", "test", tokenizer, 10_000, 1000, 0)
    assert torch.equal(found, every)
    assert use.sequences == len(every) < 10_000


# ---- sources ----


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("wikitxt", "unknown source 'wikitxt'; did you mean 'wikitext'"),
        ("zzz", "known: c4, embedded, mixed, self, ultrachat, wikitext"),
        ("self", "use self_sampled"),
        ("ids.npy", "ids.npy holds ids, not text"),
        ("missing.txt", "cannot read missing.txt: No such file.*offline sources: embedded"),
        ("missing.jsonl", "cannot read missing.jsonl"),
    ],
)
def test_sources_that_are_none(source, message):
    with pytest.raises(CalibrationError, match=message):
        sources.texts(source, "calibration")


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n", encoding="utf-8")
    assert sources.texts(str(path), "test") == ["one\n\ntwo\n"]
    path.write_bytes(b"ab\xff")
    with pytest.raises(CalibrationError, match="a.txt is not UTF-8 at byte 2"):
        sources.texts(str(path), "test")


def test_json_lines(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    first = json.dumps({"text": "x\u2028y"}, ensure_ascii=False)
    path.write_text(first + "\n\n" + json.dumps({"messages": talk}), encoding="utf-8")
    assert sources.texts(str(path), "test", tokenizer) == ["x\u2028y", "user: Hi\nassistant: Ho"]
    templated = AutoTokenizer.from_pretrained(PICO)
    templated.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert sources.texts(str(path), "test", templated)[1] == "<user>Hi<assistant>Ho"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{text: 1}", r"a.jsonl:3: not JSON \(.* at column 2\); write one object per line"),
        ('{"txt": "a", "id": 1}', "a.jsonl:3: no text in the columns txt, id; write.*name the column of the text"),
        ('{"text": 1}', "a.jsonl:3: no text in the columns text; write"),
        ('"text"', "a.jsonl:3: no text, but str; write"),
        ('{"messages": []}', "a.jsonl:3: messages: no text, but an empty list"),
        ('{"messages": [{"role": "user"}]}', r"a.jsonl:3: messages\[0\]: no text; its keys are role; write"),
    ],
)
def test_bad_json_lines_are_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(CalibrationError, match=message):
        sources.texts(str(path), "calibration")


# ---- the hub ----


class Rows(list):
    """Stands in for a streamed data set."""

    def take(self, count: int) -> Iterator[dict]:
        return iter(self[:count])


def test_hub_sets(monkeypatch):
    asked = []
    rows = Rows([{"text": "a"}, {"text": "b"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **rest: asked.append((names, rest)) or rows)
    assert sources.texts("wikitext", "test") == ["a\n\nb"]
    assert sources.texts("c4", "calibration") == ["a", "b"]
    rows[:] = [{"messages": [{"role": "user", "content": "Hi"}]}]
    assert sources.texts("ultrachat", "calibration") == ["user: Hi"]
    assert [(names, rest["split"]) for names, rest in asked] == [
        (("Salesforce/wikitext", "wikitext-2-raw-v1"), "test"),
        (("allenai/c4", None), "train"),
        (("HuggingFaceH4/ultrachat_200k", None), "train_sft"),
    ]
    assert asked[1][1]["data_files"] == {"train": "en/c4-train.00000-of-01024.json.gz"}


@pytest.mark.parametrize("source", sources.HUB_SETS)
@pytest.mark.parametrize(
    "failure",
    [
        ConnectionError("no route\nto host"),
        HTTPError("no route"),
        ValueError("no route in cache"),
        datasets.exceptions.DatasetsError("no route"),
    ],
)
def test_an_unreachable_hub_names_the_offline_choices(monkeypatch, source, failure):
    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(datasets, "load_dataset", fail)
    message = f"test: source {source} .*not be loaded from the hub: no route.*; offline sources: embedded"
    with pytest.raises(CalibrationError, match=message):
        sources.texts(source, "test")


def test_the_hub_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets.exceptions", None)
    with pytest.raises(CalibrationError, match="source c4 needs the package datasets.*; offline sources"):
        sources.texts("c4", "test")


# ---- stored ids ----


def stored(folder: Path, ids: np.ndarray) -> str:
    """Write an .npy file and return its path."""
    np.save(folder / "ids.npy", ids, allow_pickle=True)
    return str(folder / "ids.npy")


@pytest.mark.parametrize("dtype", ["uint16", "int32", ">i8"])
def test_stored_ids(tmp_path, dtype):
    path = stored(tmp_path, np.arange(12).reshape(3, 4).astype(dtype))
    every = ids_of.token_ids(path, "calibration", None, None, None, seed=0)
    assert every.dtype == torch.int64
    assert every.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert ids_of.token_ids(path, "test", None, 2, 3, seed=0).tolist() == [[0, 1, 2], [4, 5, 6]]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros(4, dtype=int), r"holds int64 of shape \[4\]; write an integer array of shape"),
        (np.zeros((2, 2)), r"holds float64 of shape \[2, 2\]"),
        (
            np.zeros((1, 4), dtype=int),
            "holds 1 sequences of 4 tokens, but 2 sequences of 3 are requested; use sequences <= 1",
        ),
        (np.zeros((4, 2), dtype=int), "holds 4 sequences of 2 tokens, but 2 sequences of 3 are requested"),
        (np.array([[0, 1, 2], [0, 1, -7]]), r"holds -7 at \[1, 2\]; write ids >= 0"),
        (np.zeros((0, 4), dtype=int), r"holds no tokens \(shape \[0, 4\]\); write an integer array of shape"),
        (np.zeros((4, 0), dtype=int), "holds no tokens"),
        (np.array([[{}]]), "not a plain .npy array"),
    ],
)
def test_bad_stored_ids(tmp_path, ids, message):
    with pytest.raises(CalibrationError, match=message):
        ids_of.token_ids(stored(tmp_path, ids), "calibration", None, 2, 3, seed=0)


def test_stored_ids_that_are_not_there(tmp_path):
    with pytest.raises(CalibrationError, match="cannot read .*none.npy: No such file"):
        ids_of.token_ids(str(tmp_path / "none.npy"), "calibration", None, None, None, seed=0)
    (tmp_path / "text.npy").write_text("not an array")
    with pytest.raises(CalibrationError, match="text.npy is not a plain .npy array"):
        ids_of.token_ids(str(tmp_path / "text.npy"), "calibration", None, None, None, seed=0)
    (tmp_path / "zero.npy").write_bytes(b"")
    with pytest.raises(CalibrationError, match="zero.npy is not a plain .npy array"):
        ids_of.token_ids(str(tmp_path / "zero.npy"), "calibration", None, None, None, seed=0)


# ---- sampled by the model itself ----


def sampled(model, tokenizer, sequences=3, length=20, seed=3, **options):
    return self_sampling.self_sampled(model, tokenizer, sequences, length, seed, self_sampling.Sampling(**options))


def test_self_sampled(model, tokenizer):
    before = torch.random.get_rng_state()
    ids = sampled(model, tokenizer, batch=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert ids.shape == (3, 20)
    assert ids.dtype == torch.int64
    assert not torch.isin(ids[:, 0], torch.tensor(tokenizer.all_special_ids)).any()
    assert len({tuple(row) for row in ids.tolist()}) == 3
    assert torch.equal(ids, sampled(model, tokenizer, batch=2))
    assert not torch.equal(ids, sampled(model, tokenizer, seed=4))


@pytest.mark.parametrize("batch", [1, 3, None])
def test_the_draws_of_a_sequence_do_not_depend_on_the_batch(model, tokenizer, batch):
    assert torch.equal(sampled(model, tokenizer, 5, batch=batch), sampled(model, tokenizer, 5, batch=2))


def test_self_sampled_begins_with_the_most_likely_tokens(model, tokenizer):
    ids = sampled(model, tokenizer, 8, 12, temperature=10.0)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    logits[..., tokenizer.eos_token_id] = -torch.inf
    likely = logits.argmax(dim=-1) == ids[:, 1:]
    assert likely[:, :3].all()
    assert not likely[:, 5:].any(dim=0).all()


def test_after_the_end_of_a_document_another_one_starts(model, tokenizer):
    end = tokenizer.eos_token_id
    draws = torch.full((2, 3), 0.25, dtype=torch.float64)
    chooser = self_sampling.DrawnTokens(draws, torch.tensor([7, 8]), torch.tensor([end]), 1.0)
    logits = torch.zeros(2, model.config.vocab_size)
    logits[:, 9] = 40.0
    assert chooser(torch.tensor([[5, end], [end, 5]]), logits).argmax(dim=-1).tolist() == [7, 9]


@pytest.mark.parametrize("temperature", [0.01, 1.0])
def test_tokens_have_the_probabilities_of_the_softmax(temperature):
    logits = torch.tensor([[0.0, 1.0, 2.0]]) / temperature
    draws = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    counts = self_sampling.inverse_cdf(logits.expand(2000, -1), draws).bincount(minlength=3)
    assert torch.allclose(counts / 2000, logits.softmax(-1)[0], atol=1e-3)


def test_sequences_with_loops_are_sampled_again(model, tokenizer):
    any_text = sampled(model, tokenizer, 8, 64, temperature=0.1, max_repetition=1.0)
    shares = self_sampling.repetition(any_text)
    limit = float(shares.mean())
    assert float(shares.max()) > limit  # a cold model repeats itself
    better = sampled(model, tokenizer, 8, 64, temperature=0.1, max_repetition=limit)
    assert self_sampling.repetition(better).mean() < shares.mean()
    first = any_text[shares <= limit]
    assert torch.equal(better[: len(first)], first)


def test_repetition_is_the_share_of_runs_that_came_before():
    ids = torch.arange(24)
    looped = torch.arange(8).repeat(3)
    assert self_sampling.repetition(torch.stack([ids, looped])).tolist() == pytest.approx([0, 1 - 8 / 17])
    assert self_sampling.repetition(torch.zeros(1, 4, dtype=torch.int64)).tolist() == [0]  # shorter than a run


@pytest.mark.parametrize("length", [1, 2, 5])
def test_short_self_sampled_sequences(model, tokenizer, length):
    assert sampled(model, tokenizer, length=length).shape == (3, length)


def test_self_sampled_ignores_the_sampling_settings_of_the_model(model, tokenizer):
    plain = sampled(model, tokenizer, 4, 24)
    changed = AutoModelForCausalLM.from_pretrained(PICO)
    settings = {"do_sample": True, "temperature": 0.1, "top_k": 2, "top_p": 0.5, "max_length": 20}
    changed.generation_config.update(**settings)
    assert torch.equal(plain, sampled(changed, tokenizer, 4, 24))
    assert changed.generation_config.to_dict().items() >= settings.items()


@pytest.mark.parametrize("name", ["sequences", "length", "batch"])
def test_self_sampled_counts(model, tokenizer, name):
    counts = {"sequences": 1, "length": 8, "batch": 1, name: 0}
    with pytest.raises(CalibrationError, match=f"self: {name} is 0; use 1 or more"):
        sampled(model, tokenizer, **counts)


@pytest.mark.parametrize("name", ["temperature", "max_repetition"])
def test_options_of_sampling_belong_to_sampled_text(name):
    assert getattr(TextSource(source="self", **{name: 0.5}), name) == 0.5
    with pytest.raises(ValueError, match=f"{name} has no effect: embedded is not sampled"):
        TextSource(source="embedded", **{name: 0.5})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ids.npy", r"ids\.npy holds the token id 1024, but the model's vocabulary has 1024; use ids that were made"),
        (
            "a.txt",
            r"the tokenizer turns .*a\.txt into the token id 1024, but .* has 1024: it has tokens that the model",
        ),
    ],
)
def test_ids_outside_of_the_vocabulary_say_who_made_them(name, message, pico_model):
    ids = torch.tensor([[3, 1024]])
    with pytest.raises(CalibrationError, match=message):
        ids_of.check_vocabulary(ids, pico_model, TextSource(source=name), "calibration")
    ids_of.check_vocabulary(ids - 1, pico_model, TextSource(source=name), "calibration")
