"""The `embedded` and `mixed` sources: texts that come with Python and with this package.

`embedded` is Python's language reference. `mixed` has several kinds of text: short documents of the reference, of the
standard library's code and of `written/` (prose, dialogues and nine other languages, written for this package) follow
each other, so that any number of sequences from the start contains all kinds. Reference and code differ between CPython
versions, and reports include the digest of the text.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from pydoc_data.topics import topics

from compress.data.text_source import Part
from compress.errors import CalibrationError

TEST_RESIDUES = range(8)  # of 20; their topics hold 22 to 23% of the characters in CPython 3.10 to 3.13
DOCUMENT = 1500
"""Characters at which a document of the mixed text ends, after the paragraph."""
MODULES = (
    *("bisect", "calendar", "cmd", "code", "colorsys", "configparser", "contextlib", "copy", "csv", "difflib"),
    *("filecmp", "fnmatch", "fractions", "getopt", "gettext", "heapq", "html.parser", "http.cookies"),
    *("json.decoder", "logging.handlers", "queue", "random", "sched", "shlex", "statistics", "string", "textwrap"),
    *("urllib.robotparser", "wave"),
)
"""Modules of the standard library, in Python in all supported versions."""


def embedded_text(part: Part) -> list[str]:
    """Return the documents of `pydoc_data.topics` in this part, sorted by the name of their topic.

    The split is by topic and is fixed by the hash of its name. Some topics repeat passages of others, so paragraphs
    that occur in the test part are removed from the calibration part (ignoring white space).
    """
    names = sorted(topics)
    test = [topics[name] for name in names if _is_test(name)]
    if part == "test":
        return test
    held_out = {" ".join(paragraph.split()) for text in test for paragraph in paragraphs(text)}
    documents = []
    for name in names:
        if not _is_test(name):
            remaining = [p for p in paragraphs(topics[name]) if " ".join(p.split()) not in held_out]
            documents.append("\n\n".join(remaining))
    return [document for document in documents if document]


def mixed_text(part: Part) -> list[str]:
    """Return the documents of the mixed text in this part; only the calibration part has texts of `written/`.

    Raises:
        CalibrationError: if this Python has no source files of its standard library.
    """
    reference = _in_mixed_order(chain.from_iterable(map(documents_of, embedded_text(part))))
    code = _in_mixed_order(chain.from_iterable(map(documents_of, _code(part))))
    written = _in_mixed_order(_written()) if part == "calibration" else []
    groups = zip_longest(written, reference, code)
    return [document for group in groups for document in group if document is not None]


def documents_of(text: str) -> Iterator[str]:
    """Cut a text into documents of whole paragraphs with about `DOCUMENT` characters."""
    document = ""
    for paragraph in paragraphs(text):
        document += ("\n\n" if document else "") + paragraph
        if len(document) >= DOCUMENT:
            yield document
            document = ""
    if document:
        yield document


def paragraphs(text: str) -> list[str]:
    """Split a text at its blank lines."""
    return [paragraph for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def _code(part: Part) -> Iterator[str]:
    """Yield source files of the standard library, whatever files of the same names the current folder has."""
    folder = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        if _is_test(name) == (part == "test"):
            path = folder.joinpath(*name.split(".")).with_suffix(".py")
            if not path.is_file():
                raise CalibrationError(
                    f"{part}: mixed: this Python has no source file of the module {name}; use embedded, or a text file"
                )
            yield path.read_text(encoding="utf-8")


def _written() -> Iterator[str]:
    """Yield the texts of `written/`."""
    folder = files("compress.data").joinpath("written")
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        yield from paragraphs(file.read_text(encoding="utf-8"))


def _in_mixed_order(documents: Iterable[str]) -> Sequence[str]:
    """Return documents in an order that depends only on the texts."""
    return sorted(documents, key=lambda document: hashlib.sha256(document.encode()).digest())


def _is_test(name: str) -> bool:
    """Whether a topic or module belongs to the test part."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 in TEST_RESIDUES
