"""Where texts and calibration ids come from: the standard library, the hub, a local file, or the model.

The `embedded` source needs no network and no file: it is the language reference that every CPython carries
for `help()` (`pydoc_data.topics`, some 450,000 characters). It differs between CPython versions, so a number
measured on it is reported together with `text_sha256`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import CalibrationError, did_you_mean
from compress.model.prediction import is_masked, special_ids

Part = Literal["calibration", "test"]

OFFLINE = "offline choices: embedded, self, or the path of a .txt, .jsonl or .npy file"
TEST_RESIDUES = range(8)  # of 20; their topics hold 22 to 23% of the characters in CPython 3.10 to 3.13
HUB_DOCUMENTS = 4096  # enough for 512 sequences of 2048 tokens of web text, and seconds to stream
GREEDY_TOKENS = (3, 5)  # LLM-QAT, sec. 3.1: so many top-1 tokens follow the first; the rest is sampled


class HubSet(NamedTuple):
    """How one named set is loaded from the hub; `files` and `splits` are keyed by part."""

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

    `source` is `embedded`, a hub set (`wikitext`, `c4`, `ultrachat`) or the path of a .txt file (one
    document) or a .jsonl file (one object a line, with `text` or `messages`). A file has no parts: it is read
    whole for both.
    Conversations are written by the tokenizer's chat template if it has one, else as `role: content` lines.
    c4 and ultrachat give their first `HUB_DOCUMENTS` documents.

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


def token_ids(
    source: str,
    part: Part,
    tokenizer: PreTrainedTokenizerBase | None,
    sequences: int | None,
    length: int | None,
    seed: int,
) -> Int[Tensor, "sequences length"]:
    """Return int64 ids: `sequences` windows of `length` tokens that do not overlap.

    Text is tokenized without special tokens, joined (`token_stream`) and cut from its start (`windows`). The
    calibration part takes windows drawn at random without replacement, the same ones for the same `seed`; the
    test part takes the first ones in order. `sequences=None` takes every window in order; text always needs a
    `length`. A .npy file holds ids already ([n, m], integers): its first `sequences` rows and first `length`
    columns are taken, all of them for None, and `part`, `tokenizer` and `seed` play no role.

    Raises `CalibrationError` where the source cannot give what was asked.
    """
    for name, count in (("sequences", sequences), ("length", length)):
        if count is not None and count < 1:
            raise CalibrationError(f"{part}: {name} is {count}; use 1 or more")
    if Path(source).suffix == ".npy":
        return _stored_ids(Path(source), sequences, length)
    if length is None:
        raise CalibrationError(f"{part}: length is missing; {source} text needs one, such as length 2048")
    if tokenizer is None:
        raise CalibrationError(f"{part}: {source} text needs a tokenizer, and the model has none; give ids in a .npy")
    stream = token_stream(texts(source, part, tokenizer), tokenizer)
    cut = windows(stream, length)
    if len(cut) == 0:
        raise CalibrationError(
            f"{part}: {source} text has {len(stream)} tokens, less than one sequence of {length}; "
            f"use a shorter length, or another source"
        )
    if sequences is None:
        return cut
    if len(cut) < sequences:
        raise CalibrationError(
            f"{part}: {source} text gives {len(cut)} sequences of {length} tokens, {sequences} were asked; "
            f"use sequences <= {len(cut)}, a shorter length, or another source"
        )
    if part == "test":
        return cut[:sequences].clone()
    return cut[torch.randperm(len(cut), generator=torch.Generator().manual_seed(seed))[:sequences]]


def token_stream(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " tokens"]:
    """Tokenize each document and join them with the end-of-text token, or with nothing if there is none."""
    if not documents:
        return torch.empty(0, dtype=torch.int64)
    # verbose=False: a document longer than the model's context is expected here, it is cut into windows.
    encoded = tokenizer(list(documents), add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids
    between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    joined = list(encoded[0])
    for ids in encoded[1:]:
        joined += between
        joined += ids
    return torch.tensor(joined, dtype=torch.int64)


def windows(stream: Int[Tensor, " tokens"], length: int) -> Int[Tensor, "windows length"]:
    """Cut consecutive windows that do not overlap; a shorter rest at the end is left out."""
    count = len(stream) // length
    return stream[: count * length].reshape(count, length)


def self_sampled(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: int,
    length: int,
    seed: int,
    batch: int = 8,
) -> Int[Tensor, "sequences length"]:
    """Let the model write its own calibration text (LLM-QAT, https://arxiv.org/abs/2305.17888, sec. 3.1).

    Each sequence starts from one token drawn uniformly from the vocabulary without its special tokens; the
    next 3 to 5 tokens (one number per batch) are the most likely ones, the rest is sampled from the full
    softmax. The model's end tokens are suppressed, so every sequence has `length` tokens. The result (int64,
    on the CPU) depends on `seed` and `batch`, and the global random state is left as it was.

    Raises `CalibrationError` for a count below 1, and for a model that cannot go on with a text.
    """
    if is_masked(type(model), model.config):
        raise CalibrationError(
            f"calibration: {type(model).__name__} predicts masked tokens and cannot write a text of its own (source "
            "self); use another source, such as embedded, or a .txt, .jsonl or .npy file"
        )
    for name, count in (("sequences", sequences), ("length", length), ("batch", batch)):
        if count < 1:
            raise CalibrationError(f"self: {name} is {count}; use 1 or more")
    starts = _start_ids(model, tokenizer)
    on_gpu = [model.device] if model.device.type == "cuda" else []
    rows = []
    with torch.random.fork_rng(devices=on_gpu):
        torch.manual_seed(seed)
        for first in range(0, sequences, batch):
            size = min(batch, sequences - first)
            ids = starts[torch.randint(len(starts), (size, 1))].to(model.device)
            low, high = GREEDY_TOKENS
            greedy = min(int(torch.randint(low, high + 1, ())), length - 1)
            ids = _continue(model, tokenizer, ids, greedy, sample=False)
            rows.append(_continue(model, tokenizer, ids, length - ids.shape[1], sample=True).cpu())
    return torch.cat(rows)


def text_sha256(documents: Sequence[str]) -> str:
    """Return the hash of the documents (UTF-8, with a zero byte after each), which reports carry.

    The embedded corpus follows the CPython version that runs, so two perplexities measured on it compare only
    where this hash is the same.
    """
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def corpus_sha256(ids: Int[Tensor, "sequences length"]) -> str:
    """Return the hash of the ids, row by row, as little-endian int64."""
    return hashlib.sha256(ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def embedded_text(part: Part) -> list[str]:
    """Return the documents of `pydoc_data.topics` in this part, sorted by the name of their topic.

    The split is by topic and fixed by the hash of its name. Some topics repeat passages of others, so
    paragraphs that the test part holds are left out of the calibration part (white space does not count).
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
    """Return whether a topic of the embedded corpus belongs to the test part."""
    return int(hashlib.sha256(topic.encode()).hexdigest(), 16) % 20 in TEST_RESIDUES


def _paragraphs(text: str) -> list[str]:
    """Split a text at its blank lines."""
    return [paragraph for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def _no_text(source: str) -> str:
    """Return the message for a source that is no source of text."""
    if source == "self":
        return (
            "calibration: source self is written by the model and has no text of its own; "
            "use self_sampled, or a source of text such as embedded"
        )
    if Path(source).suffix == ".npy":
        return f"calibration: {source} holds ids, not text; use token_ids, or a .txt or .jsonl file"
    hint = did_you_mean(source, ["embedded", "self", *HUB_SETS])
    return f"calibration: unknown source {source!r}{hint}; a file is given by its path (.txt, .jsonl, .npy)"


def _hub_texts(source: str, part: Part, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Load one of `HUB_SETS`; every failure on the way becomes one `CalibrationError`."""
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
    """Fetch the rows of a hub set: all of wikitext, the first `HUB_DOCUMENTS` of the larger ones."""
    import datasets  # takes seconds, and only the hub sources need it

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
    """Yield (`file:line`, value) for each line of a .jsonl file that is not blank."""
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise CalibrationError(
                f"{path}:{number}: not JSON ({error.msg} at column {error.colno}); "
                f'write one object a line, such as {{"text": "..."}}'
            ) from error


def _document(row: Any, where: str, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the text of one row with `text` or `messages`."""
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
    """Return whether a value is a message with a role and a content."""
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def extent(source: str, sequences: int | None, length: int | None) -> tuple[int, int]:
    """(sequences, length) of what `token_ids` will give, 0 where only the text can tell. Raises CalibrationError."""
    if Path(source).suffix == ".npy" and (sequences is None or length is None):
        rows, columns = _stored(Path(source)).shape
        return rows if sequences is None else sequences, columns if length is None else length
    return sequences or 0, length or 0


def _stored(path: Path) -> np.ndarray:
    """The integers [n, m] of a .npy file, mapped."""
    try:
        stored = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or error
        raise CalibrationError(f"calibration: cannot read {path}: {reason}; {OFFLINE}") from error
    except (ValueError, EOFError) as error:
        raise CalibrationError(
            f"calibration: {path} is no plain .npy array ({error}); write integers with numpy.save"
        ) from error
    if stored.ndim != 2 or not np.issubdtype(stored.dtype, np.integer):
        raise CalibrationError(
            f"calibration: {path} holds {stored.dtype} of shape {list(stored.shape)}; "
            f"write an integer array of shape [sequences, length]"
        )
    return stored


def _stored_ids(path: Path, sequences: int | None, length: int | None) -> Int[Tensor, "sequences length"]:
    """Read the first `sequences` rows and `length` columns of an integer .npy file; None takes all."""
    stored = _stored(path)
    rows, columns = stored.shape
    asked = (rows if sequences is None else sequences, columns if length is None else length)
    if stored.size == 0 or asked[0] > rows or asked[1] > columns:
        raise CalibrationError(
            f"calibration: {path} holds {rows} sequences of {columns} tokens, {asked[0]} of {asked[1]} "
            f"were asked; use sequences <= {rows} and length <= {columns}, or another source"
        )
    ids = torch.from_numpy(stored[: asked[0], : asked[1]].astype(np.int64))
    if int(ids.min()) < 0:
        row, column = (ids < 0).nonzero()[0].tolist()
        raise CalibrationError(
            f"calibration: {path} holds {int(ids[row, column])} at [{row}, {column}]; write ids >= 0"
        )
    return ids


def _start_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " ids"]:
    """Return the ids of the vocabulary that are not special."""
    special = set(special_ids(tokenizer))
    size = min(len(tokenizer), model.get_input_embeddings().get_parameter("weight").shape[0])
    return torch.tensor([token for token in range(size) if token not in special])


def _continue(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    ids: Int[Tensor, "batch tokens"],
    count: int,
    sample: bool,
) -> Int[Tensor, "batch longer"]:
    """Append `count` tokens, sampled from the softmax or the most likely ones, and no end token before."""
    if count == 0:
        return ids
    # What is left out here is filled from the model's own generation config, such as its end tokens.
    softmax = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    chosen = GenerationConfig(
        do_sample=sample,
        repetition_penalty=1.0,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        **softmax,
    )
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=chosen)
