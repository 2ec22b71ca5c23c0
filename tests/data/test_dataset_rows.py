"""Data sets by the library `datasets`, from local files and folders, which need no network."""

import json

import datasets
import pytest
from transformers import AutoTokenizer

from compress.data.ids import sample
from compress.data.sources import read_texts
from compress.data.text_source import TextSource
from compress.errors import CalibrationError

ROWS = [{"body": f"row {i}", "id": i} for i in range(10)]
CHATS = [{"conversations": [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": f"a{i}"}]} for i in range(4)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Local data sets of every kind: by name, the path."""
    folder = tmp_path_factory.mktemp("sets")
    whole = datasets.Dataset.from_list(ROWS)
    whole.to_parquet(folder / "rows.parquet")
    whole.to_csv(folder / "rows.csv")
    (folder / "folder").mkdir()
    whole.to_parquet(folder / "folder" / "train.parquet")
    whole.select(range(3)).to_parquet(folder / "folder" / "validation.parquet")
    whole.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": whole, "test": whole.select([7])}).save_to_disk(folder / "splits")
    (folder / "chats").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in CHATS)
    (folder / "chats" / "train.jsonl").write_text(lines, encoding="utf-8")
    gaps = [{"text": text} for text in ("a", "", None, "b", "  ")]
    datasets.Dataset.from_list(gaps).to_parquet(folder / "gaps.parquet")
    return folder


@pytest.mark.parametrize("name", ["rows.parquet", "rows.csv", "folder", "saved", "splits"])
def test_rows_in_their_order(kept, name):
    found = read_texts(TextSource(dataset=str(kept / name), column="body"), "calibration")
    assert found.documents == [f"row {i}" for i in range(10)] and found.forms == ("text",)


def test_the_split_follows_the_part_or_the_recipe(kept):
    texts = {part: read_texts(TextSource(dataset=str(kept / "splits"), column="body"), part) for part in ("test",)}
    assert texts["test"].documents == ["row 7"]
    some = TextSource(dataset=str(kept / "folder"), column="body", split="validation")
    assert read_texts(some, "calibration").documents == ["row 0", "row 1", "row 2"]
    sliced = TextSource(dataset=str(kept / "folder"), column="body", split="train[:20%]")
    assert read_texts(sliced, "calibration").documents == ["row 0", "row 1"]


def test_only_the_first_rows_are_read(kept):
    few = TextSource(dataset=str(kept / "folder"), column="body", max_documents=4)
    assert len(read_texts(few, "calibration").documents) == 4


def test_conversations_and_the_chat_template(kept, pico, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(pico)
    chats = TextSource(dataset=str(kept / "chats"), chat_template=str(template))
    found = read_texts(chats, "calibration", tokenizer)
    assert found.documents[1] == "<user>q1<assistant>a1"
    assert (found.forms, found.template) == (("conversations",), str(template))
    plain = read_texts(TextSource(dataset=str(kept / "chats")), "calibration", tokenizer)
    assert (plain.documents[1], plain.template) == ("user: q1\nassistant: a1", "role: content")


def test_blank_rows_are_left_out_and_counted(kept, pico):
    found = read_texts(TextSource(dataset=str(kept / "gaps.parquet")), "calibration")
    assert found.documents == ["a", "b"] and found.skipped == 3
    tokenizer = AutoTokenizer.from_pretrained(pico)
    _, use = sample(TextSource(dataset=str(kept / "gaps.parquet")), "calibration", tokenizer, 1, 2, 0)
    assert (use.documents, use.skipped, use.forms) == (2, 3, ["text"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nowhere/in/here", {}, "dataset .*nowhere/in/here: no such file or folder; write a hub id"),
        ("gaps.parquet", {"column": "txt"}, "row 0: no column 'txt'; its columns are text"),
        ("folder", {}, "row 0: no text in the columns body, id"),
        ("folder", {"split": "tset", "column": "body"}, "could not be read: .*tset.*train.*validation"),
        ("splits", {"split": "tst", "column": "body"}, r"could not be read: no split 'tst'; did you mean 'test'"),
    ],
)
def test_mistakes(kept, name, options, message):
    with pytest.raises(CalibrationError, match=message):
        read_texts(TextSource(dataset=str(kept / name), **options), "calibration")


def test_files_of_an_unknown_kind(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(CalibrationError, match=r"is not a data set file \(.parquet, .csv.*write it as source: "):
        read_texts(TextSource(dataset=str(tmp_path / "a.txt")), "calibration")


def test_a_data_set_of_the_hub_is_asked_for_as_the_recipe_says(monkeypatch):
    asked = []

    def load(*names, **rest):
        asked.append((names, rest))
        return iter([{"text": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = TextSource(dataset="some/set", config="en", split="validation", revision="v1")
    assert read_texts(source, "test").documents == ["a"]
    assert asked == [(("some/set", "en"), {"split": "validation", "revision": "v1", "streaming": True})]
    assert source.label == "some/set (en, validation)"


def test_an_unreachable_hub_names_the_offline_choices(monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(CalibrationError, match="source some/set could not be loaded from the hub: no route; offline"):
        read_texts(TextSource(dataset="some/set"), "calibration")
