"""Tokenize documents in bounded pieces: the ids are those of the whole documents, the memory that of a piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compress.data.pieces import PIECE, Piece

CONTEXT = 1 << 10
"""Characters on both sides of a cut in a long document: the tokens at the cut are those of the whole document."""


def encode(
    pieces: Iterable[Piece], tokenizer: PreTrainedTokenizerBase, limit: int | None = None, together: int = PIECE
) -> Iterator[tuple[int, list[int]]]:
    """Yield the token ids of documents without special tokens, as (document, ids).

    The ids of a long document come in several parts.

    Args:
        pieces: Documents in order, each in one piece or in several.
        tokenizer: Their tokenizer. One without offsets of tokens (a slow one) reads each piece as a separate text.
        limit: The most ids of a document.
        together: Characters of the short documents that are read, and tokenized, at once.
    """
    short: list[Piece] = []
    for number, parts in groupby(pieces, key=lambda piece: piece.document):
        start = list(islice(parts, 2))
        if len(start) > 1 or sum(len(piece.text) for piece in [*short, *start]) > together:
            yield from _batch(short, tokenizer, limit)
            short = []
        if len(start) == 1:
            short += start
        else:
            yield from ((number, ids) for ids in _long(chain(start, parts), tokenizer, limit))
    yield from _batch(short, tokenizer, limit)


def _batch(
    documents: Sequence[Piece], tokenizer: PreTrainedTokenizerBase, limit: int | None
) -> Iterator[tuple[int, list[int]]]:
    """Yield the ids of short documents."""
    if documents:
        # verbose=False: a document may be longer than the model's context; it is cut into windows
        texts = [piece.text for piece in documents]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids
        yield from ((piece.document, ids[:limit]) for piece, ids in zip(documents, encoded, strict=True))


def _long(pieces: Iterator[Piece], tokenizer: PreTrainedTokenizerBase, limit: int | None) -> Iterator[list[int]]:
    """Yield the ids of one document in parts.

    Each part is tokenized with `CONTEXT` characters before and after it, whose tokens belong to other parts.
    """
    text, begin, piece = "", -1, next(pieces, None)  # begin: where the last token ends that was yielded
    while piece is not None and limit != 0:
        text, piece = text + piece.text, next(pieces, None)
        stop = len(text) if piece is None else len(text) - CONTEXT
        if tokenizer.is_fast:
            encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ends = [end for _, end in encoding.offset_mapping]
            tokens: list[int] = encoding.input_ids  # pyright: ignore[reportAssignmentType]  of one text
            ids = [token for token, end in zip(tokens, ends, strict=True) if begin < end <= stop]
            last = max((end for end in ends if end <= stop), default=max(0, begin))
            cut = max(0, last - CONTEXT)
            text, begin = text[cut:], last - cut
        else:
            [(_, ids)] = _batch([Piece(0, text)], tokenizer, None)
            text = ""
        yield ids[:limit]
        limit = None if limit is None else max(0, limit - len(ids))


def join(
    encoded: Iterable[tuple[int, Sequence[int]]], tokenizer: PreTrainedTokenizerBase, previous: int | None = None
) -> Iterator[Sequence[int]]:
    """Yield the ids of documents, and the end-of-text token between two documents if there is one.

    Args:
        encoded: Documents by number, and their ids.
        tokenizer: Has the end-of-text token.
        previous: The number of the document before the first one; None if there is none.
    """
    end_of_text: Any = tokenizer.eos_token_id
    between: list[int] = [] if end_of_text is None else [end_of_text]
    for document, ids in encoded:
        if previous is not None and document != previous:
            yield between
        previous = document
        yield ids


def token_stream(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> Int[Tensor, " tokens"]:
    """Tokenize each document, keep `limit` tokens, and join them with the end-of-text token, or directly if none."""
    pieces = (Piece(number, text) for number, text in enumerate(documents))
    return stream_of(join(encode(pieces, tokenizer, limit), tokenizer)).long()


def stream_of(parts: Iterable[Sequence[int]], most: int | None = None) -> Int[Tensor, " tokens"]:
    """Return the ids of parts as one tensor; parts after the first `most` ids are not read."""
    tensors, count = [torch.empty(0, dtype=torch.int32)], 0
    for ids in parts:
        tensors.append(torch.tensor(ids, dtype=torch.int32))
        count += len(ids)
        if most is not None and count >= most:
            break
    return torch.cat(tensors)
