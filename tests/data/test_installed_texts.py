"""The `mixed` source: several kinds of text in turn, the same ones for the same Python."""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from compress.data.ids import token_ids
from compress.data.installed_texts import MODULES, documents_of, embedded_text, mixed_text
from compress.errors import CalibrationError

PICO = Path(__file__).parents[1] / "pico" / "model"
WRITTEN = Path(importlib.util.find_spec("compress.data").submodule_search_locations[0]) / "written"


@pytest.fixture(scope="module")
def documents():
    return mixed_text("calibration")


def test_kinds_follow_each_other_from_the_start(documents):
    written = {text.strip() for file in WRITTEN.iterdir() for text in file.read_text("utf-8").split("\n\n")}
    reference = "\n\n".join(embedded_text("calibration"))
    for first in range(0, 30, 3):
        prose, words, code = documents[first : first + 3]
        assert prose.strip() in written and words.split("\n\n")[0] in reference and "    " in code
    assert written <= {document.strip() for document in documents}


def test_the_order_depends_on_the_text_alone(documents):
    assert mixed_text("calibration") == documents


def test_the_parts_share_no_document(documents):
    assert not set(documents) & set(mixed_text("test"))


def test_documents_hold_whole_paragraphs():
    text = "\n\n".join(f"{number} {'word ' * 60}" for number in range(30))
    cut = list(documents_of(text))
    assert "\n\n".join(cut) == text and len(cut) > 1
    assert all(1500 <= len(document) < 2000 for document in cut[:-1])


def test_calibration_reads_the_first_sequences():
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    many, few = (token_ids("mixed", "calibration", tokenizer, count, 64, seed=5) for count in (12, 4))
    assert many[:4].tolist() == few.tolist()


def test_files_of_the_current_folder_are_not_read(tmp_path, monkeypatch, documents):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this file is not part of Python')\n")
    assert mixed_text("calibration") == documents


def test_a_python_without_sources_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr("compress.data.installed_texts.sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(CalibrationError, match="mixed: this Python has no source file of the module calendar"):
        mixed_text("calibration")
