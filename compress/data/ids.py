"""Token ids: windows of a text, ids stored in a file, and the examples that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.data.dataset_rows import OFFLINE
from compress.data.listed import check_listed, listed_sample, lists_of
from compress.data.opening import needs_tokenizer, opening_tokens, special_tokens_around
from compress.data.sources import check_source, read_texts, text_sha256
from compress.data.text_source import Part, TextSource, as_source
from compress.errors import CalibrationError
from compress.models.kinds.batch import Examples
from compress.models.kinds.contract import text_config, text_lengths
from compress.models.kinds.kinds import adapter_of, described
from compress.models.structure.ends import vocabulary_size


class TextUse(BaseModel):
    """The use of a text in a run, for its report.

    part: calibration or test. sequences, length: of the chosen examples; the most tokens of one. sha256: of the
    documents; of the examples, if they are stored, sampled or listed. documents: their number, None for stored or
    sampled ids. tokens: of all documents, before sequences are chosen; of lists those of the chosen examples.
    forms, template, skipped: as `Texts`. bos: whether each sequence begins with the beginning-of-sequence token that
    `sample` was given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    part: str
    sequences: int
    length: int
    sha256: str
    documents: int | None = None
    skipped: int = 0
    tokens: int | None = None
    forms: list[str] = []
    template: str | None = None
    packing: bool | None = None
    max_tokens_per_document: int | None = None
    bos: bool = False

    @classmethod
    def of_examples(cls, text: str, part: str, examples: Examples, bos: bool = False) -> TextUse:
        """The use of stored or sampled ids, or of a list."""
        return cls(
            text=text,
            part=part,
            sequences=len(examples),
            length=examples.length,
            sha256=examples.sha256(),
            bos=bos,
        )


Sample = tuple[Examples, TextUse]
"""Examples, and the use of the text that they come from."""


def token_ids(
    source: str | TextSource,
    part: Part,
    tokenizer: PreTrainedTokenizerBase | None,
    sequences: int | None,
    length: int | None,
    seed: int,
) -> Int[Tensor, "sequences length"]:
    """Return int64 ids: `sequences` windows of `length` tokens that do not overlap (`sample`)."""
    return sample(source, part, tokenizer, sequences, length, seed)[0]


def sample(
    source: str | TextSource,
    part: Part,
    tokenizer: PreTrainedTokenizerBase | None,
    sequences: int | None,
    length: int | None,
    seed: int,
    prefix: Sequence[int] = (),
) -> tuple[Int[Tensor, "sequences length"], TextUse]:
    """Return int64 ids, `sequences` of `length` tokens that do not overlap, and the use of the text.

    Text is tokenized without special tokens, joined (`token_stream`) and cut from its start (`windows`); without
    packing, each sequence is the start of one document. prefix: tokens that every sequence begins with; they count in
    `length`. The calibration part takes sequences at random without replacement, the same ones for the same `seed`. The
    test part takes the first ones in order, and all of a text that has fewer. `sequences=None` takes every sequence in
    order; text always needs a `length`. A .npy file holds ids ([n, m], integers): its first `sequences` rows and first
    `length` columns are taken, or all of them for None; `part`, `tokenizer`, `seed` and `prefix` are ignored.

    Raises `CalibrationError` when the source cannot provide the sequences.
    """
    source = as_source(source)
    for name, count in (("sequences", sequences), ("length", length)):
        if count is not None and count < 1:
            raise CalibrationError(f"{part}: {name} is {count}; use 1 or more")
    if source.stored:
        ids = _stored_ids(Path(str(source.source)), sequences, length)
        return ids, TextUse.of_examples(source.label, part, Examples.of_ids(ids))
    if length is None:
        raise CalibrationError(f"{part}: length is missing; {source.label} text needs one, such as length 2048")
    if tokenizer is None:
        raise CalibrationError(
            f"{part}: {source.label} text needs a tokenizer, and the model has none; use ids in a .npy file"
        )
    texts = read_texts(source, part, tokenizer)
    cut, tokens = _sequences(texts.documents, tokenizer, source, length, prefix)
    chosen = _chosen(cut, source, part, tokens, len(texts.documents), sequences, length, seed)
    use = TextUse(
        text=source.label,
        part=part,
        sequences=len(chosen),
        length=length,
        sha256=text_sha256(texts.documents),
        documents=len(texts.documents),
        skipped=texts.skipped,
        tokens=tokens,
        forms=list(texts.forms),
        template=texts.template,
        packing=source.packing,
        max_tokens_per_document=source.max_tokens_per_document,
        bos=len(prefix) > 0,
    )
    return chosen, use


def _sequences(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, source: TextSource, length: int, prefix: Sequence[int]
) -> tuple[Int[Tensor, "sequences length"], int]:
    """All sequences of the documents, and the number of their tokens."""
    limit = source.max_tokens_per_document
    if source.packing:
        stream = token_stream(documents, tokenizer, limit)
        return windows(stream, length, prefix), len(stream)
    encoded = [ids[:limit] for ids in encode(documents, tokenizer)]
    begun = [ids if ids[: len(prefix)] == list(prefix) else [*prefix, *ids] for ids in encoded]
    rows = [ids[:length] for ids in begun if len(ids) >= length]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, length), sum(map(len, encoded))


def _chosen(
    cut: Int[Tensor, "all length"],
    source: TextSource,
    part: Part,
    tokens: int,
    documents: int,
    sequences: int | None,
    length: int,
    seed: int,
) -> Int[Tensor, "sequences length"]:
    """Choose among all sequences. Raises CalibrationError when there are too few."""
    name = source.label
    if not source.packing and len(cut) < (sequences or 1):
        raise CalibrationError(
            f"{part}: {len(cut)} of the {documents} documents of {name} have {length} tokens or more, but sequences is "
            f"{sequences}; use a shorter length, fewer sequences, packing: true, or more documents"
        )
    if len(cut) == 0:
        raise CalibrationError(
            f"{part}: {name} text has {tokens} tokens, fewer than one sequence of {length}; "
            f"use a shorter length, or another source"
        )
    if sequences is None or part == "test":
        return cut[:sequences]
    if len(cut) < sequences:
        raise CalibrationError(
            f"{part}: {name} text has {len(cut)} sequences of {length} tokens, but sequences is {sequences}; "
            f"use sequences <= {len(cut)}, a shorter length, or another source"
        )
    return cut[torch.randperm(len(cut), generator=torch.Generator().manual_seed(seed))[:sequences]]


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide a number in proportion to weights, by the largest remainders; of equal ones, the first."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: counts[i] - exact[i])
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def token_stream(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> Int[Tensor, " tokens"]:
    """Tokenize each document, keep `limit` tokens, and join them with the end-of-text token, or directly if none."""
    return join([ids[:limit] for ids in encode(documents, tokenizer)], tokenizer)


def encode(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The token ids of each document, without special tokens."""
    if not documents:
        return []
    # verbose=False: a document may be longer than the model's context; it is cut into windows
    return tokenizer(list(documents), add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids


def join(encoded: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " tokens"]:
    """Join the ids of documents with the end-of-text token, or directly if there is none."""
    between = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    joined = list(encoded[0]) if encoded else []
    for ids in encoded[1:]:
        joined += between
        joined += ids
    return torch.tensor(joined, dtype=torch.int64)


def windows(stream: Int[Tensor, " tokens"], length: int, prefix: Sequence[int] = ()) -> Int[Tensor, "windows length"]:
    """Cut consecutive windows that do not overlap; the incomplete window at the end is dropped.

    Each begins with the prefix; one whose text begins with it (a chat template writes it) does not get it twice.
    """
    if not prefix:
        count = len(stream) // length
        return stream[: count * length].reshape(count, length)
    begin, rows, at = torch.tensor(prefix, dtype=stream.dtype), [stream[:0].reshape(0, length)], 0
    while at < len(stream):
        added = begin[:0] if stream[at : at + len(begin)].equal(begin) else begin
        row = torch.cat([added, stream[at : at + length - len(added)]])
        if len(row) < length:
            break
        rows.append(row[None])
        at += length - len(added)
    return torch.cat(rows)


def extent(source: str | TextSource, sequences: int | None, length: int | None) -> tuple[int, int]:
    """(sequences, length) that `token_ids` will return; 0: unknown before the text is read. Raises CalibrationError."""
    source = as_source(source)
    if source.stored and (sequences is None or length is None):
        rows, columns = _stored(Path(str(source.source))).shape
        return rows if sequences is None else sequences, columns if length is None else length
    return sequences or 0, length or 0


def _stored(path: Path) -> np.ndarray:
    """Memory-map the integers [n, m] of a .npy file."""
    try:
        stored = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or error
        raise CalibrationError(f"calibration: cannot read {path}: {reason}; {OFFLINE}") from error
    except (ValueError, EOFError) as error:
        raise CalibrationError(
            f"calibration: {path} is not a plain .npy array ({error}); write integers with numpy.save"
        ) from error
    if stored.ndim != 2 or not np.issubdtype(stored.dtype, np.integer):
        raise CalibrationError(
            f"calibration: {path} holds {stored.dtype} of shape {list(stored.shape)}; "
            f"write an integer array of shape [sequences, length]"
        )
    return stored


def _check_shape(path: Path, sequences: int | None, length: int | None) -> tuple[int, int]:
    """Return the shape that is taken from a .npy file. Raises CalibrationError if the file is smaller."""
    rows, columns = shape = _stored(path).shape
    count, width = rows if sequences is None else sequences, columns if length is None else length
    if 0 in shape:
        raise CalibrationError(
            f"calibration: {path} holds no tokens (shape {list(shape)}); write an integer array of shape "
            f"[sequences, length], or use another source"
        )
    if count > rows or width > columns:
        raise CalibrationError(
            f"calibration: {path} holds {rows} sequences of {columns} tokens, but {count} sequences of {width} "
            f"are requested; use sequences <= {rows} and length <= {columns}, or another source"
        )
    return count, width


def _stored_ids(path: Path, sequences: int | None, length: int | None) -> Int[Tensor, "sequences length"]:
    """Read the first `sequences` rows and `length` columns of an integer .npy file; None takes all."""
    stored = _stored(path)
    shape = _check_shape(path, sequences, length)
    ids = torch.from_numpy(stored[: shape[0], : shape[1]].astype(np.int64))
    if int(ids.min()) < 0:
        row, column = (ids < 0).nonzero()[0].tolist()
        raise CalibrationError(
            f"calibration: {path} holds {int(ids[row, column])} at [{row}, {column}]; write ids >= 0"
        )
    return ids


def model_sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    source: str | TextSource,
    part: Part,
    count: int | None,
    length: int | None,
    seed: int = 0,
) -> Sample:
    """Return the examples of a text for a model, and its use; count and length None: all that a .npy file holds.

    For an encoder or a classifier, each window is placed between the special tokens that its tokenizer adds to a text;
    they count in `length`. For an encoder with a decoder, so is each half of a window, its source and its target. For
    other models, each sequence begins with the tokens that the tokenizer adds before a text (`opening_tokens`). Every
    sequence is full, so that none needs padding. The ids of a .npy file are not changed. Lists of files, such as
    recordings, are read by `data.listed`.

    Raises CalibrationError: no such text, too little text, ids outside the vocabulary, sequences longer than the
    model's positions, or a model without a tokenizer.
    """
    source = as_source(source)
    check_text(model, tokenizer, source, part, count, length)
    if lists_of(model, source) is not None:
        examples, documents = listed_sample(model, tokenizer, source, part, count, length, seed)
        use = TextUse.of_examples(source.label, part, examples)
        return examples, use.model_copy(update={"documents": documents, "tokens": examples.tokens})
    kind, needed = adapter_of(model), None if source.stored else needs_tokenizer(tokenizer, part)
    if needed is not None and length is not None and not kind.streams:
        opening, closing = special_tokens_around(needed)
        lengths = [text_length - len(opening + closing) for text_length in text_lengths(kind.texts, length)]
        ids, use = sample(source, part, needed, count, sum(lengths), seed)
        start, end = (torch.tensor(side, dtype=ids.dtype).expand(len(ids), -1) for side in (opening, closing))
        texts = [torch.cat([start, text, end], dim=1) for text in ids.split(lengths, dim=1)]
    else:
        prefix = () if needed is None else opening_tokens(source, needed, part)
        ids, use = sample(source, part, needed, count, length, seed, prefix)
        texts = ids.split(text_lengths(kind.texts, ids.shape[1]), dim=1)
    check_vocabulary(ids, model, source, part)
    return kind.examples(model, texts), use


def check_vocabulary(
    ids: Int[Tensor, "sequences length"], model: PreTrainedModel, source: TextSource, part: Part
) -> None:
    """Raises CalibrationError when the model does not know an id."""
    size = vocabulary_size(model)
    if int(ids.max()) >= size:
        raise CalibrationError(
            f"{part}: {source.label} holds the token id {int(ids.max())}, but the model's vocabulary has {size}; "
            "use ids that were made with the model's own tokenizer"
        )


def check_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    source: TextSource,
    part: Part,
    count: int | None,
    length: int | None,
) -> None:
    """Check what can be known of a text before it is read; the model may be without weights.

    Raises CalibrationError: an unknown source, a missing file, no tokenizer, stored ids of another shape, sequences
    longer than the model's positions or too short for a loss.
    """
    if (lists := lists_of(model, source)) is not None:
        check_listed(model, tokenizer, source, lists, part)
        return
    check_source(source, part)
    needed = None if source.stored else needs_tokenizer(tokenizer, part)
    if source.stored:
        _check_shape(Path(str(source.source)), count, length)
    kind, around = adapter_of(model), [0]
    is_bounded, texts = not kind.streams, kind.texts
    if source.bos is not None and is_bounded:
        raise CalibrationError(f"{part}: bos has no effect: {described(model)}; leave it out")
    if needed is not None and not (is_bounded and source.sampled):
        added = special_tokens_around(needed) if is_bounded else [opening_tokens(source, needed, part)]
        around = [len(tokens) for tokens in added]
    if length is not None and text_lengths(texts, length)[-1] <= sum(around):
        raise CalibrationError(f"{part}: length {length} leaves no room beside the special tokens; use a larger length")
    limit, tokens = source.max_tokens_per_document, extent(source, count, length)[1]
    if not source.packing and limit is not None and limit + sum(around) < tokens:
        raise CalibrationError(
            f"{part}: no document of {source.label} fills a sequence of {tokens} tokens, because "
            f"max_tokens_per_document is {limit}; use a shorter length, or packing: true"
        )
    longest: Any = getattr(text_config(model.config), "max_position_embeddings", None)
    if longest is not None and 0 < texts * longest < tokens:  # some configurations say -1: no limit
        raise CalibrationError(
            f"{part}: length {tokens} exceeds the model's {texts * longest} positions; use length <= {texts * longest}"
        )
    if tokens == 1:
        raise CalibrationError(
            f"{part}: {source.label} has one token per sequence, but a loss needs 2; use length >= 2"
        )
