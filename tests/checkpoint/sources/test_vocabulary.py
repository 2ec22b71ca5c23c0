"""A teacher must have the student's tokenizer; the first difference is named."""

import json
import shutil
from pathlib import Path

import pytest

from compress.checkpoint.opening import open_model
from compress.checkpoint.sources.files import read_tokenizer
from compress.checkpoint.sources.vocabulary import check_teacher, first_difference
from compress.errors import ModelError


def test_the_same_tokenizer_in_another_place_is_no_difference(pico, tmp_path):
    check_teacher(str(shutil.copytree(pico, tmp_path / "copy")), open_model(pico), trust_remote_code=False)


def test_the_first_token_that_differs_is_named(pico, tmp_path):
    folder = shutil.copytree(pico, tmp_path / "other")
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = found["model"]["vocab"]
    one, two = (next(text for text, i in vocabulary.items() if i == number) for number in (300, 301))
    vocabulary[one], vocabulary[two] = 301, 300
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(ModelError) as error:
        check_teacher(str(folder), open_model(pico), trust_remote_code=False)
    record = f"token 300 is {two!r} in the teacher and {one!r} in the model; use a teacher with the model's vocabulary"
    assert f"{folder} and the model have different tokenizers: {record}" in str(error.value)


def test_other_numbers_of_tokens_are_told(pico, tiny_folder):
    with pytest.raises(
        ModelError, match="has a vocabulary of 64 tokens, the model of 1024; use a teacher with the model's vocabulary"
    ):
        check_teacher(tiny_folder("llama"), open_model(pico), trust_remote_code=False)


def test_a_teacher_that_predicts_something_else_is_refused(tiny_folder):
    for one, two, record in (
        ("bert", "llama", "masked tokens, the model predicts next"),
        ("llama", "bert", "next tokens, the model predicts masked"),
    ):
        with pytest.raises(ModelError, match=f"predicts {record} tokens; use a teacher of the model's kind"):
            check_teacher(tiny_folder(one), open_model(tiny_folder(two)), trust_remote_code=False)


def test_a_model_without_tokenizer_is_held_to_the_number_of_tokens_alone(pico):
    assert first_difference(None, read_tokenizer(Path(pico), False)) is None
