"""Sources of texts and calibration ids: the standard library, the hub, local files, or the model.

The `embedded` source needs no network and no file: it is the language reference that every CPython contains for
`help()` (`pydoc_data.topics`, about 450,000 characters). It differs between CPython versions, so reports include
`text_sha256` with every measurement on it.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from compress.errors import CalibrationError, did_you_mean

Part = Literal["calibration", "test"]

OFFLINE = "offline sources: embedded, self, or the path of a .txt, .jsonl or .npy file"
TEST_RESIDUES = range(8)  # of 20; their topics hold 22 to 23% of the characters in CPython 3.10 to 3.13
HUB_DOCUMENTS = 4096  # enough for 512 sequences of 2048 tokens of web text, and seconds to stream


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


def texts(source: str, part: Part, tokenizer: PreTrainedTokenizerBase | None = None) -> list[str]:
    """Return the documents of `source`.

    `source` is `embedded`, a hub set (`wikitext`, `c4`, `ultrachat`), the path of a .txt file (one document), or the
    path of a .jsonl file (one object per line, with `text` or `messages`). A file has no parts: both parts read the
    whole file. Conversations are formatted by the tokenizer's chat template, or as `role: content` lines if it has
    none. c4 and ultrachat return their first `HUB_DOCUMENTS` documents.

    Raises `CalibrationError` for an unknown source, a missing or malformed file, and an unreachable hub.
    """
    if source == "embedded":
        return embedded_text(part)
    if source in HUB_SETS:
        return _hub_texts(source, part, tokenizer)
    path = Path(source)
    if path.suffix == ".txt":
        return [_read(path)]
    if path.suffix == ".jsonl":
        return [_document(row, where, tokenizer) for where, row in _json_lines(path)]
    raise CalibrationError(_no_text(source))


def text_sha256(documents: Sequence[str]) -> str:
    """The hash of the documents (UTF-8, with a zero byte after each) for reports.

    The embedded corpus depends on the CPython version. Two perplexities measured on it are comparable only if this hash
    is the same.
    """
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def embedded_text(part: Part) -> list[str]:
    """Return the documents of `pydoc_data.topics` in this part, sorted by the name of their topic.

    The split is by topic and is fixed by the hash of its name. Some topics repeat passages of others, so paragraphs
    that occur in the test part are removed from the calibration part (ignoring white space).
    """
    names = sorted(topics)
    test = [topics[name] for name in names if _is_test(name)]
    if part == "test":
        return test
    held_out = {" ".join(paragraph.split()) for text in test for paragraph in _paragraphs(text)}
    documents = []
    for name in names:
        if not _is_test(name):
            kept = [p for p in _paragraphs(topics[name]) if " ".join(p.split()) not in held_out]
            documents.append("\n\n".join(kept))
    return [document for document in documents if document]


def _is_test(topic: str) -> bool:
    """Whether a topic of the embedded corpus belongs to the test part."""
    return int(hashlib.sha256(topic.encode()).hexdigest(), 16) % 20 in TEST_RESIDUES


def _paragraphs(text: str) -> list[str]:
    """Split a text at its blank lines."""
    return [paragraph for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def _no_text(source: str) -> str:
    """The error message for a source without text."""
    if source == "self":
        return (
            "calibration: source self is sampled from the model and has no stored text; "
            "use self_sampled, or a source of text such as embedded"
        )
    if Path(source).suffix == ".npy":
        return f"calibration: {source} holds ids, not text; use token_ids, or a .txt or .jsonl file"
    hint = did_you_mean(source, ["embedded", "self", *HUB_SETS])
    return f"calibration: unknown source {source!r}{hint}; for a file write its path (.txt, .jsonl, .npy)"


def _hub_texts(source: str, part: Part, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Load one of `HUB_SETS`; every failure is raised as `CalibrationError`."""
    try:  # imported here, because they take seconds and only the hub sources need them
        from datasets.exceptions import DatasetsError
        from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]  its client's
    except ImportError as error:
        raise CalibrationError(
            f"{part}: source {source} needs the package datasets ({error}); pip install datasets; {OFFLINE}"
        ) from error
    try:
        rows = _hub_rows(source, part)
    except (OSError, ValueError, RuntimeError, DatasetsError, HTTPError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CalibrationError(
            f"{part}: source {source} ({HUB_SETS[source].path}) could not be loaded from the hub: {reason}; {OFFLINE}"
        ) from error
    if source == "wikitext":
        return ["\n\n".join(row["text"] for row in rows)]  # the convention of GPTQ and of its successors
    return [_document(row, f"{source} row {number}", tokenizer) for number, row in enumerate(rows)]


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


def _read(path: Path) -> str:
    """Read a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"calibration: cannot read {path}: {error.strerror}; {OFFLINE}") from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"calibration: {path} is not UTF-8 at byte {error.start}; save it as UTF-8") from error


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (`file:line`, value) for each non-blank line of a .jsonl file."""
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise CalibrationError(
                f"{path}:{number}: not JSON ({error.msg} at column {error.colno}); "
                f'write one object per line, such as {{"text": "..."}}'
            ) from error


def _document(row: Any, where: str, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The text of one row with `text` or `messages`."""
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return row["text"]
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise CalibrationError(
            f'{where}: no text; write {{"text": "..."}} or {{"messages": [{{"role": "user", "content": "..."}}]}}'
        )
    if tokenizer is not None and tokenizer.chat_template is not None:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _is_message(message: Any) -> bool:
    """Whether a value is a message with a role and a content."""
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
