"""Texts in bounded pieces: the ids of the whole text, shares that do not overlap, draws by the seed alone."""

import json
import resource
import subprocess
import sys
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from compress.data import ids as ids_of
from compress.data.ids import sample
from compress.data.installed_texts import embedded_text
from compress.data.pieces import PIECE, Piece, TextShare, TextTally, draw, pieces_of, shared
from compress.data.sources import read_pieces, text_sha256
from compress.data.text_source import TextSource
from compress.data.tokenization import token_stream
from compress.errors import CalibrationError

LONG = "\n\n".join(embedded_text("calibration"))
"""More than four pieces."""


@pytest.fixture(scope="module")
def byte_level(pico):
    return AutoTokenizer.from_pretrained(pico)


@pytest.fixture(scope="module")
def sentences():
    """A tokenizer as SentencePiece makes them: spaces are characters, and a text begins with one."""
    words = Tokenizer(models.Unigram())
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    words.train_from_iterator(LONG[:60_000].split("\n\n"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


def ids_of_whole(text, tokenizer):
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


# ---- pieces ----


@given(st.lists(st.text(alphabet="a \n", min_size=1, max_size=3 * 1024), max_size=6), st.integers(1, 2000))
def test_pieces_are_the_text_whatever_the_chunks(chunks, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.data.pieces.PIECE", 512)
        text = "".join(chunks)
        pieces = list(pieces_of(7, chunks))
        again = list(pieces_of(7, [text[i : i + size] for i in range(0, len(text), size)]))
    assert "".join(piece.text for piece in pieces) == text and pieces == again
    assert all(piece.document == 7 and len(piece.text) <= 512 for piece in pieces)


def test_pieces_end_before_a_word():
    pieces = list(pieces_of(0, [LONG]))
    assert len(pieces) > 4 and all(piece.text[0] in " \n" for piece in pieces[1:])


@pytest.mark.parametrize("name", ["byte_level", "sentences"])
def test_the_ids_of_a_long_document_are_those_of_the_whole(name, request, tmp_path):
    tokenizer = request.getfixturevalue(name)
    path = tmp_path / "long.txt"
    path.write_text(LONG, encoding="utf-8")
    ids, use = sample(str(path), "test", tokenizer, None, 1, 0)
    assert ids.flatten().tolist() == ids_of_whole(LONG, tokenizer)
    assert (use.documents, use.tokens, use.sha256) == (1, len(ids), text_sha256([LONG]))
    few, use = sample(str(path), "test", tokenizer, 3, 64, 0)
    assert few.flatten().tolist() == ids[: 3 * 64].flatten().tolist()
    assert (use.tokens, use.sha256) == (None, text_sha256([LONG]))


def test_characters_of_several_bytes_at_the_ends_of_chunks(byte_level, tmp_path, monkeypatch):
    monkeypatch.setattr("compress.data.sources.CHUNK", 5)
    text = "añ€𝄞 one\r\ntwo\n" * 20
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    ids, _ = sample(str(path), "test", byte_level, None, 1, 0)
    assert ids.flatten().tolist() == ids_of_whole(text.replace("\r\n", "\n"), byte_level)
    path.write_bytes(text.encode() + b"\xe2\x82")
    with pytest.raises(CalibrationError, match=f"not UTF-8 at byte {len(text.encode())}; save"):
        sample(str(path), "test", byte_level, None, 1, 0)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_pieces_of_a_file_take_the_memory_of_a_few_pieces(name, tmp_path):
    path, text = tmp_path / name, LONG[:1000]
    line = json.dumps({"text": text}) + "\n" if name == "a.jsonl" else text
    path.write_text(line * (16_000_000 // len(line)), encoding="utf-8")
    tracemalloc.start()
    try:
        count = sum(len(piece.text) for piece in read_pieces(TextSource(source=str(path)), "test", None, TextTally()))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == len(text) * (16_000_000 // len(line)) and peak_bytes < 12_000_000


@pytest.fixture
def read(byte_level, monkeypatch):
    """What the tokenizer was called with: a text, or a list of texts."""
    calls = []
    call = type(byte_level).__call__
    monkeypatch.setattr(
        type(byte_level), "__call__", lambda self, text, **rest: calls.append(text) or call(self, text, **rest)
    )
    return calls


def test_short_documents_are_tokenized_a_few_at_a_time(byte_level, read, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"text": LONG[:1000]}) + "\n") * 300, encoding="utf-8")
    _, use = sample(str(path), "test", byte_level, None, 8, 0)
    sizes = [sum(map(len, texts)) for texts in read]
    assert use.documents == 300 and sum(sizes) == 300_000 and max(sizes) <= PIECE


def test_only_the_start_of_a_document_is_tokenized_for_its_first_tokens(byte_level, read, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": LONG}) for _ in range(3)), encoding="utf-8")
    limited = TextSource(source=str(path), max_tokens_per_document=50)
    ids, use = sample(limited, "test", byte_level, None, 10, 0)
    whole = ids_of_whole(LONG, byte_level)
    end = byte_level.eos_token_id
    assert ids.flatten().tolist() == [*whole[:50], end, *whole[:50], end, *whole[:50]][:150]
    assert use.documents == 3 and sum(len(text) for text in read if isinstance(text, str)) < 2 * len(LONG)
    alone, _ = sample(TextSource(source=str(path), packing=False), "calibration", byte_level, 3, 60, 0)
    assert alone.tolist() == [whole[:60]] * 3


# ---- draws ----


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(0, 600), st.integers(0, 5))
def test_draws_keep_the_order_and_the_size(sizes, characters, seed):
    pieces = [Piece(i // 3, chr(97 + i) * size) for i, size in enumerate(sizes)]
    drawn = draw(pieces, characters, seed)
    texts = [piece.text for piece in drawn.runs]
    total = sum(map(len, texts))
    assert drawn == draw(pieces, characters, seed)
    assert total <= characters or len(texts) == 1
    assert drawn.partial or texts == [piece.text for piece in pieces]
    places = [[piece.text for piece in pieces].index(text) for text in texts if text]
    assert places == sorted(places)
    if not drawn.partial:  # the runs are the documents
        assert [piece.document for piece in drawn.runs] == [piece.document for piece in pieces]


def test_a_large_text_is_drawn_before_it_is_tokenized(byte_level, tmp_path, monkeypatch):
    monkeypatch.setattr(ids_of, "POOL", PIECE)
    path = tmp_path / "long.txt"
    path.write_text(LONG, encoding="utf-8")
    draws = [sample(str(path), "calibration", byte_level, 2, 32, seed) for seed in (0, 0, 1)]
    assert torch.equal(draws[0][0], draws[1][0]) and not torch.equal(draws[0][0], draws[2][0])
    assert draws[0][1].tokens is None
    text = "".join(LONG.split())
    for row in draws[0][0]:
        assert "".join(byte_level.decode(row[1:-1]).split()) in text
    every, use = sample(str(path), "calibration", byte_level, 1500, 32, 0)  # more than the first draw has
    assert len(every) == 1500 and use.tokens is not None


# ---- shares ----


@given(st.integers(0, 1000), st.sampled_from(["documents", "rows", "characters"]))
def test_shares_are_disjoint_and_everything(count, unit):
    test, calibration = (TextShare.of_part(part, count, unit) for part in ("test", "calibration"))
    assert (test.start, test.stop) == (0, max(1, count // 4))
    assert calibration.start == test.stop and calibration.stop == max(count, test.stop)


@given(st.lists(st.text(alphabet="ab \n", max_size=50), min_size=1, max_size=12))
def test_divided_pieces_are_disjoint_and_everything(texts):
    pieces = [Piece(i, text) for i, text in enumerate(texts)]
    parts = [list(shared(pieces, TextShare.of_part(part, len(texts), "rows"))) for part in ("test", "calibration")]
    assert parts[0] + parts[1] == pieces
    whole = "".join(texts)
    cut = [Piece(0, text) for text in texts]
    parts = [shared(cut, TextShare.of_part(part, len(whole), "characters")) for part in ("test", "calibration")]
    assert "".join(piece.text for part in parts for piece in part) == whole


def test_a_divided_file_is_read_by_both_parts_without_overlap(byte_level, tmp_path):
    path = tmp_path / "rows.jsonl"
    documents = [f"{i} {text}" for i, text in enumerate(embedded_text("test"))]
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents), encoding="utf-8")
    source = TextSource(source=str(path), divided=True)
    (test, test_use), (rest, rest_use) = (
        sample(source, part, byte_level, None, 8, 0) for part in ("test", "calibration")
    )
    bound = len(documents) // 4
    for ids, part in ((test, documents[:bound]), (rest, documents[bound:])):
        stream = token_stream(part, byte_level)
        assert ids.flatten().tolist() == stream[: len(stream) // 8 * 8].tolist()
    assert test_use.share.text == f"documents 1 to {bound} of {len(documents)}"
    assert rest_use.share.text == f"documents {bound + 1} to {len(documents)} of {len(documents)}"
    assert test_use.sha256 == rest_use.sha256 == text_sha256(documents)
    with pytest.raises(
        CalibrationError, match=r"rows.jsonl \(documents 1 to .*reads the rest\) text has \d+ tokens, fewer"
    ):
        sample(source, "test", byte_level, None, 10**6, 0)


PROGRAM = """
import resource, sys
from transformers import AutoTokenizer
from compress.data.ids import sample
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
sample("embedded", "test", tokenizer, 1, 8, 0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for part in ("calibration", "test"):
    sample(sys.argv[2], part, tokenizer, 2, 32, 0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.few(0, slow=1)
@pytest.mark.skipif(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 10**4, reason="ru_maxrss is not in KiB")
@pytest.mark.parametrize("name", ["lines.txt", "line.txt", "rows.jsonl"])
def test_two_sequences_of_a_large_text_take_little_memory(pico, tmp_path, name):
    """24 MB of text, and one line of 24 MB; tokenized whole they take 3.5 GB."""
    path = tmp_path / name
    text = (LONG if name != "line.txt" else LONG.replace("\n", " ")) * (24_000_000 // len(LONG))
    path.write_text(json.dumps({"text": text}) if name == "rows.jsonl" else text, encoding="utf-8")
    printed = subprocess.run([sys.executable, "-c", PROGRAM, pico, path], capture_output=True, text=True, check=True)
    assert int(printed.stdout) < (60_000 if name != "rows.jsonl" else 200_000)  # KiB; a row is in memory whole
