"""Data sets as streams: files opened, rows read, and what a report records; folders, divided streams, mixtures."""

import sys
from collections import Counter
from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer

import compress
from compress import Calibration, Evaluate, Recipe
from compress.data.dataset_rows import AT_ONCE, dataset_rows
from compress.data.ids import sample
from compress.data.sources import read_texts
from compress.data.text_source import TextSource
from compress.errors import CalibrationError, RecipeError

FILES, ROWS = 20, 30
OPENED: list[str] = []
"""Data files that Python has opened; an audit hook cannot be removed, so it is one for all tests."""
sys.addaudithook(lambda event, args: OPENED.append(str(args[0])) if event == "open" else None)


def text_of(file: int, row: int) -> str:
    words = f"file{file} row{row} " + " ".join(f"w{(file * 31 + row * 7 + i) % 97}" for i in range(60))
    return words


@pytest.fixture(scope="module", params=["parquet", "jsonl"])
def folder(request, tmp_path_factory) -> Path:
    """A folder of many files."""
    place = tmp_path_factory.mktemp("many") / request.param
    place.mkdir()
    for file in range(FILES):
        rows = datasets.Dataset.from_list([{"text": text_of(file, row)} for row in range(ROWS)])
        path = place / f"part-{file:04}.{request.param}"
        rows.to_parquet(path) if request.param == "parquet" else rows.to_json(path)
    return place


@pytest.fixture(scope="module")
def tokenizer(pico):
    return AutoTokenizer.from_pretrained(pico)


def opened_in(folder: Path) -> set[str]:
    return {name for name in OPENED if Path(name).parent == folder}


def stream(folder: Path, **options) -> TextSource:
    return TextSource(dataset=str(folder), streaming=True, **options)


def file_of(document: str) -> str:
    return document.partition(" ")[0]


def test_only_the_files_and_rows_of_the_sequences_are_read(folder, tokenizer):
    OPENED.clear()
    ids, use = sample(stream(folder), "calibration", tokenizer, 4, 64, seed=0)
    assert ids.shape == (4, 64) and len(opened_in(folder)) == AT_ONCE
    assert use.streamed and use.documents < FILES * ROWS / 2 and use.tokens < 4 * 64 + 1000
    OPENED.clear()
    _, whole = sample(TextSource(dataset=str(folder)), "calibration", tokenizer, 4, 64, seed=0)
    assert len(opened_in(folder)) == FILES and whole.documents == FILES * ROWS and not whole.streamed


def test_a_folder_that_is_missing_is_named_as_one(tmp_path, tokenizer):
    source = TextSource(source=f"{tmp_path}/none", streaming=True)
    with pytest.raises(CalibrationError, match="none: no such file or folder"):
        sample(source, "calibration", tokenizer, 2, 32, seed=0)


def test_equal_seeds_read_equal_rows_and_other_seeds_other_files(folder, tokenizer):
    (first, use), (again, same) = (sample(stream(folder), "calibration", tokenizer, 4, 64, seed=1) for _ in range(2))
    other, different = sample(stream(folder), "calibration", tokenizer, 4, 64, seed=2)
    assert first.equal(again) and use == same and not first.equal(other) and use.sha256 != different.sha256


def test_calibration_reads_files_in_turns_and_all_rows_once(folder):
    rows = [row["text"] for row in dataset_rows(stream(folder), "calibration", 3)]
    assert sorted(rows) == sorted(text_of(file, row) for file in range(FILES) for row in range(ROWS))
    assert len({file_of(text) for text in rows[:AT_ONCE]}) == AT_ONCE
    assert Counter(map(file_of, rows[: 3 * AT_ONCE])) == dict.fromkeys(map(file_of, rows[:AT_ONCE]), 3)
    of_one_file = [text for text in rows if file_of(text) == "file7"]
    assert of_one_file == [text_of(7, row) for row in range(ROWS)]


def test_the_evaluation_reads_the_first_rows_in_order(folder, tokenizer):
    OPENED.clear()
    source = stream(folder, split="train")
    ids, use = sample(source, "test", tokenizer, 2, 32, seed=5)
    assert len(opened_in(folder)) <= 5 and use.streamed
    start = tokenizer(text_of(0, 0), add_special_tokens=False).input_ids
    assert ids[0, :20].tolist() == start[:20]


def test_a_limit_of_rows_holds_and_none_is_the_default_of_a_stream(folder):
    assert stream(folder).max_documents is None and TextSource(dataset="a/b").max_documents == 4096
    assert len(list(dataset_rows(stream(folder, max_documents=7), "calibration"))) == 7
    again = TextSource.model_validate(stream(folder).model_dump())
    assert again == stream(folder)


def test_a_stream_that_is_too_short_says_so(folder, tokenizer):
    with pytest.raises(CalibrationError, match="sequences of 512 tokens, but sequences is 100000; use sequences <= "):
        sample(stream(folder), "calibration", tokenizer, 100_000, 512, 0)
    with pytest.raises(CalibrationError, match="0 of the 600 documents of .* have 5000 tokens or more"):
        sample(stream(folder, packing=False), "calibration", tokenizer, 1, 5000, 0)


def test_documents_alone_in_their_sequences(folder, tokenizer):
    ids, use = sample(stream(folder, packing=False), "calibration", tokenizer, 5, 64, seed=0)
    starts = [tokenizer.decode(row[:12]) for row in ids]
    assert len(set(starts)) == 5 and all(start.startswith("file") for start in starts) and use.streamed


def test_a_divided_stream_has_disjoint_parts_that_need_no_count(folder):
    def read(part):
        return set(read_texts(stream(folder, split="train"), part).documents)

    def of(part, tokenizer):
        return sample(stream(folder, split="train", divided=True, packing=False), part, tokenizer, None, 64, 0)

    assert read("calibration") == read("test")
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "pico" / "model")
    (calibration, use), (test, test_use) = of("calibration", tokenizer), of("test", tokenizer)
    texts = [{tokenizer.decode(row[:12]) for row in ids} for ids in (calibration, test)]
    assert not texts[0] & texts[1] and len(texts[0]) + len(texts[1]) == FILES * ROWS
    assert 0.15 < len(texts[1]) / (FILES * ROWS) < 0.35
    assert use.share.text == "documents whose digest is in classes 2 to 4 of 4"
    assert test_use.share.text == "documents whose digest is in classes 1 to 1 of 4"


def test_a_folder_is_a_source(folder, tmp_path, monkeypatch):
    text = TextSource(source=str(folder), streaming=True)
    assert text.dataset == str(folder) and text.source is None
    (tmp_path / "c4").mkdir()
    monkeypatch.chdir(tmp_path)
    assert TextSource(source="c4").source == "c4" and TextSource(source="./c4").dataset == "./c4"
    (tmp_path / "texts").symlink_to(folder)
    (tmp_path / "recipe.yaml").write_text(
        "model: m\npasses: [gptq]\neval: null\ncalibration: {source: texts/, streaming: true}\n"
    )
    monkeypatch.chdir(folder)
    assert Recipe.from_yaml(tmp_path / "recipe.yaml").calibration.dataset == str(tmp_path / "texts")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "embedded"}, "streaming has no effect: it is an option of data sets, and the source is embedded"),
        ({"dataset": "a/b", "split": "train[:10%]"}, "streaming is not possible with split train"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        TextSource(streaming=True, **options)


def test_a_run_calibrates_on_a_mixture_of_streams_and_records_what_it_read(folder, pico, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    datasets.Dataset.from_list([{"text": text_of(99, row)} for row in range(200)]).to_parquet(other / "a.parquet")
    mixture = [
        {"source": str(folder), "streaming": True, "weight": 3, "split": "train"},
        {"dataset": str(other), "streaming": True},
    ]
    evaluated = {"dataset": str(folder), "split": "train", "streaming": True}
    recipe = Recipe(
        model=pico,
        calibration=Calibration(mixture=mixture, sequences=8, length=32),
        passes=[compress.GPTQ(weights="int4", group_size=32)],
        save={"verify": "own"},
        eval=Evaluate(perplexity=(evaluated,), windows=2, length=32),
    )
    OPENED.clear()
    result = compress.run(recipe, tmp_path / "out", progress=False)
    uses = result.measured.reproduce.texts
    assert [(use.sequences, use.streamed) for use in uses] == [(6, True), (2, True), (2, True)]
    assert uses[0].share.start == 1 and uses[2].share.stop == 1 and uses[1].share is None
    assert len(opened_in(folder)) <= AT_ONCE + 5
    assert "documents read as a stream" in (tmp_path / "out" / "report.md").read_text()
    again = Recipe.from_yaml(tmp_path / "out" / "recipe.yaml")
    assert compress.run(again, tmp_path / "again", progress=False).report["files"] == result.report["files"]
    whole = recipe.model_copy(
        update={"eval": Evaluate(perplexity=(evaluated | {"streaming": False},), windows=2, length=32)}
    )
    with pytest.raises(RecipeError, match="one of them with streaming, so it cannot be divided"):
        compress.plan(whole)
