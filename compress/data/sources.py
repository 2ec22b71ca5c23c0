"""Sources of texts and calibration ids: the standard library, the hub, local files, or the model.

The `embedded` source needs no network and no file: it is the language reference that every CPython contains for
`help()` (`pydoc_data.topics`, about 450,000 characters). It differs between CPython versions, so reports include
`text_sha256` with every measurement on it.
"""

import codecs
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from compress.data.dataset_rows import OFFLINE, check_local, dataset_rows, told_of
from compress.data.forms import RowReader
from compress.data.installed_texts import embedded_text, mixed_text
from compress.data.pieces import Piece, TextTally, pieces_of
from compress.data.text_source import HUB_DOCUMENTS, PYTHON, SECTIONS, GivenText, Part, TextSource, as_source
from compress.errors import CalibrationError, did_you_mean

CHUNK = 1 << 20
"""Bytes that are read of a file at once."""


class HubSet(NamedTuple):
    """How a named data set is loaded from the hub; `files` and `splits` are keyed by part."""

    path: str
    config: str | None
    files: dict[str, str] | None
    splits: dict[str, str]


HUB_SETS = {
    "wikitext": HubSet("Salesforce/wikitext", "wikitext-2-raw-v1", None, {"calibration": "train", "test": "test"}),
    "c4": HubSet(
        "allenai/c4",
        None,
        {
            "train": "en/c4-train.00000-of-01024.json.gz",
            "validation": "en/c4-validation.00000-of-00008.json.gz",
        },
        {"calibration": "train", "test": "validation"},
    ),
    "ultrachat": HubSet("HuggingFaceH4/ultrachat_200k", None, None, {"calibration": "train_sft", "test": "test_sft"}),
}

INSTALLED = {"embedded": embedded_text, "mixed": mixed_text}
"""Texts that need no network and no file, by name: functions of the part."""


@dataclass(frozen=True)
class Texts:
    """The documents of a source.

    forms: of its rows, sorted; empty for a source without rows. template: the chat template of its conversations: the
    name of a file, 'tokenizer', or 'role: content' for lines without a template; None if there are none. skipped: the
    number of blank rows that are left out.
    """

    documents: list[str]
    forms: tuple[str, ...] = ()
    template: str | None = None
    skipped: int = 0


def texts(source: str | TextSource, part: Part, tokenizer: PreTrainedTokenizerBase | None = None) -> list[str]:
    """Return the documents of `source` (`read_texts`)."""
    return read_texts(source, part, tokenizer).documents


def read_texts(source: str | TextSource, part: Part, tokenizer: PreTrainedTokenizerBase | None = None) -> Texts:
    """Read all documents of `source` whole (`read_pieces`)."""
    tally, source = TextTally(), as_source(source)
    pieces = list(read_pieces(source, part, tokenizer, tally))
    documents = ["".join(p.text for p in document) for _, document in groupby(pieces, key=lambda p: p.document)]
    skipped = tally.rows - tally.documents
    return Texts(documents, tuple(sorted(tally.forms)), template_name(source, tally), skipped)


def read_pieces(
    source: TextSource, part: Part, tokenizer: PreTrainedTokenizerBase | None, tally: TextTally, seed: int = 0
) -> Iterator[Piece]:
    """Yield the documents of `source` in pieces, so that a large text is never in memory whole.

    `source` is `embedded`, `mixed`, a hub set (`wikitext`, `c4`, `ultrachat`), a data set, the path of a .txt file (one
    document), or the path of a .jsonl file (one object per line) or .json file (a list of objects), whose rows have one
    of the forms of `forms.py`. A file has no parts: both parts read the whole file. Conversations are formatted by the
    chat template, or as `role: content` lines if there is none. c4 and ultrachat return their first `HUB_DOCUMENTS`
    documents. Blank rows of data sets are left out. A row, and a .json file, is in memory whole.

    Args:
        source: The text.
        part: Calibration or test.
        tokenizer: Has the chat template.
        tally: Counts what is read.
        seed: Of the choice of files, for the calibration part of a stream.

    Raises:
        CalibrationError: for an unknown source, a missing or malformed file, and an unreachable hub.
    """
    yield from tally.count(_pieces(source, part, tokenizer, tally, seed))


def _pieces(
    source: TextSource, part: Part, tokenizer: PreTrainedTokenizerBase | None, tally: TextTally, seed: int
) -> Iterator[Piece]:
    name = str(source.source)
    path = Path(name)
    if source.dataset is not None:
        rows = ((f"{source.label} row {number}", row) for number, row in enumerate(dataset_rows(source, part, seed)))
        yield from _documents(rows, source, tokenizer, tally, blank=False)
        if not tally.rows:
            raise CalibrationError(f"{part}: {source.label} has no rows; use another split")
    elif isinstance(source, GivenText) and source.data.rows is not None:
        rows = ((f"{source.label}: item {number}", row) for number, row in enumerate(source.data.rows))
        yield from _documents(rows, source, tokenizer, tally)
    elif name in INSTALLED:
        for tally.rows, document in enumerate(INSTALLED[name](part), start=1):
            yield from pieces_of(tally.rows - 1, [document])
    elif name in HUB_SETS:
        with told_of(part, name, f"({HUB_SETS[name].path}) could not be loaded from the hub"):
            rows = _hub_rows(name, part)
        if name == "wikitext":  # one document, the convention of GPTQ and of its successors
            tally.rows = 1
            yield from pieces_of(0, (("\n\n" if i else "") + row["text"] for i, row in enumerate(rows)))
        else:
            numbered = ((f"{name} row {number}", row) for number, row in enumerate(rows))
            yield from _documents(numbered, source, tokenizer, tally)
    elif path.suffix == ".txt":
        tally.rows = 1
        yield from pieces_of(0, file_chunks(path))
    elif path.suffix in (".jsonl", ".json"):
        yield from _documents(json_rows(path), source, tokenizer, tally)
    else:
        raise CalibrationError(_no_text(name))


def check_source(source: TextSource, part: Part) -> None:
    """Raise CalibrationError for an unknown source and for missing files; this reads no text and asks no hub."""
    _template(source)
    if isinstance(source, GivenText):
        return
    if source.source == PYTHON:
        raise CalibrationError(
            f"{SECTIONS[part]}: source {PYTHON} is data of a program, which no recipe holds; pass it: "
            "compress.run(RECIPE, calibration=DATA, evaluation=DATA)"
        )
    if source.dataset is not None:
        check_local(source, part)
    elif Path(str(source.source)).suffix in (".txt", ".jsonl", ".json", ".npy"):
        check_file(Path(str(source.source)))
    elif source.source not in (*INSTALLED, "self", *HUB_SETS):
        raise CalibrationError(_no_text(str(source.source)))


def _template(source: TextSource) -> str | None:
    """The chat template that replaces the tokenizer's, or None."""
    if source.chat_template is None:
        return None
    path = Path(source.chat_template)
    if not path.is_file():
        raise CalibrationError(
            f"{source.label}: chat_template: no file {path}; write the path of a Jinja template, or leave it out for "
            "that of the tokenizer"
        )
    return read_file(path)


def _documents(
    rows: Iterable[tuple[str, Any]],
    source: TextSource,
    tokenizer: PreTrainedTokenizerBase | None,
    tally: TextTally,
    blank: bool = True,
) -> Iterator[Piece]:
    """Yield the pieces of the documents of rows (place, row). blank: whether blank rows are read, too."""
    reader = row_reader(source, tokenizer)
    for tally.rows, (place, row) in enumerate(rows, start=1):
        if not blank and reader.is_blank(row):
            continue
        document = reader.document(row, place)
        tally.forms.add(document.form)
        if document.form != "text":
            tally.templated.add(document.template)
        yield from pieces_of(tally.rows - 1, [document.text])


def row_reader(source: TextSource, tokenizer: PreTrainedTokenizerBase | None) -> RowReader:
    """Return what makes documents of the rows of a text."""
    return RowReader(tokenizer, source.column, _template(source))


def template_name(source: TextSource, tally: TextTally) -> str | None:
    """The chat template of the conversations that were read, as in `Texts`."""
    if not tally.templated:
        return None
    template_source = "tokenizer" if source.chat_template is None else source.chat_template
    return template_source if True in tally.templated else "role: content"


def text_sha256(documents: Sequence[str]) -> str:
    """The hash of the documents (UTF-8, with a zero byte after each) for reports.

    The embedded corpus depends on the CPython version. Two perplexities measured on it are comparable only if this hash
    is the same.
    """
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _no_text(source: str) -> str:
    """The error message for a source without text."""
    if source == "self":
        return (
            "calibration: source self is sampled from the model and has no stored text; "
            "use self_sampled, or a source of text such as embedded"
        )
    if Path(source).suffix == ".npy":
        return f"calibration: {source} holds ids, not text; use token_ids, or a .txt or .jsonl file"
    if Path(source).suffix == ".npz":
        return f"calibration: {source} holds several arrays; write the one of token ids with numpy.save to a .npy file"
    hint = did_you_mean(source, [*INSTALLED, "self", *HUB_SETS])
    kinds = "for a file write its path (.txt, .jsonl, .json, .npy), for a data set of the hub dataset: OWNER/NAME"
    return f"calibration: unknown source {source!r}{hint}; {kinds}"


def _hub_rows(source: str, part: Part) -> list[Any]:
    """Fetch the rows of a hub set: all of wikitext, the first `HUB_DOCUMENTS` of the other sets."""
    import datasets  # takes seconds to import; only the hub sources need it

    hub = HUB_SETS[source]
    split = hub.splits[part]
    if source == "wikitext":
        return list(datasets.load_dataset(hub.path, hub.config, split=split))
    files = None if hub.files is None else {split: hub.files[split]}
    rows = datasets.load_dataset(hub.path, hub.config, data_files=files, split=split, streaming=True)
    return list(rows.take(HUB_DOCUMENTS))


def check_file(path: Path) -> None:
    """Raise CalibrationError for a file that cannot be read, and for a pipe, on which reading would wait for ever."""
    if path.exists() and not path.is_file():  # a pipe would be empty after the check
        raise CalibrationError(f"calibration: {path} is not a regular file; write the text to a file first")
    try:
        path.open("rb").close()
    except OSError as error:
        raise CalibrationError(f"calibration: cannot read {path}: {error.strerror}; {OFFLINE}") from error


def read_file(path: Path) -> str:
    """Read a UTF-8 file. Raises CalibrationError."""
    return "".join(file_chunks(path))


def file_chunks(path: Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file in chunks, its lines ended by a new line. Raises CalibrationError."""
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()  # a byte order mark is no text
    lines = io.IncrementalNewlineDecoder(None, translate=True)
    position = pending = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                pending = len(utf8.getstate()[0])
                yield lines.decode(utf8.decode(chunk))
                position += len(chunk)
            pending = len(utf8.getstate()[0])
            yield lines.decode(utf8.decode(b"", final=True), final=True)
    except OSError as error:
        raise CalibrationError(f"calibration: cannot read {path}: {error.strerror}; {OFFLINE}") from error
    except UnicodeDecodeError as error:
        place = position - pending + error.start
        raise CalibrationError(f"calibration: {path} is not UTF-8 at byte {place}; save it as UTF-8") from error


def file_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file without their ends; only new lines end them. Raises CalibrationError."""
    begun: list[str] = []
    for chunk in file_chunks(path):
        *ended, unfinished = chunk.split("\n")
        for line in ended:
            yield "".join([*begun, line])
            begun = []
        begun.append(unfinished)
    yield "".join(begun)


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a .jsonl or .json file, with the place of each. Raises CalibrationError."""
    return _json_lines(path) if path.suffix == ".jsonl" else _json_list(path)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (`file:line`, value) for each non-blank line of a .jsonl file."""
    for number, line in enumerate(file_lines(path), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise CalibrationError(
                f"{path}:{number}: not JSON ({error.msg} at column {error.colno}); "
                f'write one object per line, such as {{"text": "..."}}'
            ) from error


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (`file[index]`, value) for each value of the list in a .json file."""
    try:
        values = json.loads(read_file(path))
    except json.JSONDecodeError as error:
        raise CalibrationError(
            f"{path}:{error.lineno}: not JSON ({error.msg} at column {error.colno}); write a list of objects, or one "
            "object per line in a .jsonl file"
        ) from error
    if not isinstance(values, list):
        raise CalibrationError(f"{path}: not a list but {type(values).__name__}; write a list of objects")
    for number, value in enumerate(values):
        yield f"{path}[{number}]", value
