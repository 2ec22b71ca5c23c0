"""The texts of a run: mistakes are found by `plan`, before the first pass; what was read is in the report."""

import json

import numpy as np
import pytest
import torch
from tolerances import LOGITS
from transformers import AutoTokenizer

import compress
from compress import Calibration, Evaluate
from compress.checkpoint.opening import open_model
from compress.data.ids import token_ids
from compress.data.sources import text_sha256
from compress.errors import CalibrationError
from compress.passes.contract.journal import Journal
from compress.pipeline.texts import calibration_examples

RTN = compress.RTN(group_size=32)


def rows_of(examples):
    return [example.inputs["input_ids"][0].tolist() for example in examples]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A .jsonl file of conversations, one of them in parts."""
    path = tmp_path_factory.mktemp("rows") / "chats.jsonl"
    talk = [{"from": "human", "value": "word " * 30}, {"from": "gpt", "value": "another " * 30}]
    lines = [json.dumps({"conversations": talk}), json.dumps({"prompt": "a " * 60, "completion": "b " * 60})]
    path.write_text("\n".join(lines * 4), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": {"source": "none.jsonl"}}, "cannot read none.jsonl: No such file"),
        ({"calibration": {"source": "none.npy", "sequences": None, "length": None}}, "cannot read none.npy"),
        ({"calibration": {"source": "embeded"}}, "unknown source 'embeded'; did you mean 'embedded'"),
        ({"calibration": {"dataset": "./none"}}, "dataset ./none: no such file or folder"),
        ({"calibration": {"mixture": ["embedded", "none.txt"]}}, "cannot read none.txt"),
        (
            {"calibration": {"length": 4096}},
            "calibration: length 4096 exceeds the model's 512 positions; use length <= 512",
        ),
        ({"calibration": {"source": "self", "length": 4096}}, "length 4096 exceeds the model's 512 positions"),
        (
            {"calibration": {"packing": False, "max_tokens_per_document": 100, "length": 128}},
            "no document of embedded fills a sequence of 128 tokens, because max_tokens_per_document is 100",
        ),
        ({"eval": {"perplexity": ["none.txt"]}}, "cannot read none.txt"),
        ({"eval": {"perplexity": ["embedded"], "length": 4096}}, "eval: length 4096 exceeds the model's 512 positions"),
    ],
)
def test_mistakes_are_found_by_plan_and_before_the_first_pass(pico, tmp_path, options, message):
    asked = compress.Recipe(model=pico, passes=[RTN], **options)
    with pytest.raises(CalibrationError, match=message):
        compress.plan(asked)
    journal = Journal()
    with pytest.raises(CalibrationError, match=message):
        compress.run(asked, tmp_path / "out", journal=journal)
    assert not [entry for entry in journal.entries if entry.kind == "progress"]


def test_a_missing_chat_template_is_found_by_plan(pico, rows):
    asked = Calibration(source=rows, chat_template="none.jinja", length=64)
    with pytest.raises(CalibrationError, match="chats.jsonl: chat_template: no file none.jinja; write the path"):
        compress.plan(compress.Recipe(model=pico, passes=[RTN], calibration=asked))


def test_stored_ids_of_another_shape_are_found_by_plan(pico, tmp_path):
    np.save(tmp_path / "ids.npy", np.zeros((2, 600), dtype=np.int32))
    for asked, message in (
        (
            Calibration(source=str(tmp_path / "ids.npy"), sequences=4, length=8),
            "holds 2 sequences of 600 tokens, but 4",
        ),
        (
            Calibration(source=str(tmp_path / "ids.npy"), sequences=None, length=None),
            "length 600 exceeds the model's 512",
        ),
    ):
        with pytest.raises(CalibrationError, match=message):
            compress.plan(compress.Recipe(model=pico, passes=[RTN], calibration=asked))


def test_a_mixture_is_each_texts_share_in_one_order(pico, rows):
    text = [{"source": "embedded", "weight": 2}, {"source": rows, "packing": False}]
    asked = compress.Recipe(
        model=pico, passes=[RTN], seed=5, calibration=Calibration(mixture=text, sequences=6, length=32)
    )
    opened = open_model(pico)
    ids, uses = calibration_examples(asked, opened)
    again, _ = calibration_examples(asked, opened)
    assert rows_of(ids) == rows_of(again) and [use.sequences for use in uses] == [4, 2]
    tokenizer = AutoTokenizer.from_pretrained(pico)
    first, second = (
        token_ids(part, "calibration", tokenizer, count, 32, 5) for part, count in asked.calibration.texts()
    )
    wanted = torch.cat([first, second])
    assert sorted(rows_of(ids)) == sorted(wanted.tolist()) and rows_of(ids) != wanted.tolist()


def test_one_text_is_not_shuffled(pico):
    asked = compress.Recipe(model=pico, passes=[RTN], seed=3, calibration=Calibration(sequences=4, length=32))
    tokenizer = AutoTokenizer.from_pretrained(pico)
    ids, _ = calibration_examples(asked, open_model(pico))
    assert rows_of(ids) == token_ids("embedded", "calibration", tokenizer, 4, 32, 3).tolist()


def test_the_report_says_what_was_read(pico, rows, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}", encoding="utf-8")
    text = {"source": rows, "chat_template": str(template), "packing": False, "max_tokens_per_document": 64}
    asked = compress.Recipe(
        model=pico,
        passes=[compress.GPTQ(group_size=32)],
        calibration=Calibration(mixture=["embedded", text], sequences=4, length=32),
        eval=Evaluate(perplexity=["embedded", {"source": rows}], windows=2, length=32),
    )
    report = compress.run(asked, tmp_path / "out").report
    assert report["verified"]["own"] <= LOGITS
    embedded, chats, *evaluated = report["reproduce"]["texts"]
    assert (embedded["text"], embedded["part"], embedded["forms"], embedded["template"]) == (
        "embedded",
        "calibration",
        [],
        None,
    )
    assert chats["forms"] == ["completion", "conversations"] and chats["documents"] == 8
    assert (chats["template"], chats["packing"], chats["max_tokens_per_document"]) == (template.name, False, 64)
    talk = f"user> {'word ' * 30}\nassistant> {'another ' * 30}\n"
    pair = f"user> {'a ' * 60}\nassistant> {'b ' * 60}\n"
    assert chats["sha256"] == text_sha256([talk, pair] * 4) and chats["tokens"] == 6 * 64
    assert chats["share"] == {"unit": "documents", "start": 2, "stop": 8, "of": 8}
    assert [use["share"] for use in evaluated] == [None, {"unit": "documents", "start": 0, "stop": 2, "of": 8}]
    assert [(use["text"], use["part"], use["sequences"]) for use in evaluated] == [
        ("embedded", "test", 2),
        ("chats.jsonl", "test", 2),  # reports name no folder
    ]
    assert [text["text"] for text in report["perplexity"]] == ["embedded", "chats.jsonl"]
    page = (tmp_path / "out" / "report.md").read_text()
    assert (
        "| calibration text | chats.jsonl, completion, conversations, documents 3 to 8 of 8, 384 tokens, one document per seq"
        in page
    )
    assert "chat template: chat.jinja" in page and chats["sha256"] in page
    again = compress.Recipe.from_yaml(tmp_path / "out" / "recipe.yaml")
    assert again.calibration.mixture[1].divided and again.eval.perplexity[1].divided
    assert again.calibration.mixture[0] == asked.calibration.mixture[0] and again.passes == asked.passes
    ids, _ = calibration_examples(again, open_model(pico))
    assert ids.sha256() == report["reproduce"]["calibration_sha256"]
