"""Token ids: windows of a text, ids stored in a file, and the examples that a model reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.data.conversations import turns_of
from compress.data.dataset_rows import OFFLINE
from compress.data.listed import check_listed, listed_sample, lists_of, share_of
from compress.data.opening import needs_tokenizer, opening_tokens, special_tokens_around
from compress.data.pieces import PIECE, Piece, TextShare, TextTally, draw, shared
from compress.data.records import TextUse
from compress.data.sources import check_file, check_source, read_pieces, template_name
from compress.data.text_source import SECTIONS, GivenText, Part, TextSource, as_source
from compress.data.tokenization import encode, join, stream_of
from compress.errors import CalibrationError
from compress.models.kinds.batch import Examples
from compress.models.kinds.contract import text_lengths
from compress.models.kinds.kinds import adapter_of, described, most_tokens
from compress.models.structure.ends import vocabulary_size

POOL, POOL_CHARACTERS = 1 << 21, 64
"""Calibration sequences are drawn from pieces of a text with so many characters, and so many for each of their tokens:
about 16 times as many tokens as are drawn. A text with fewer characters is read whole."""


STREAMED = 1 << 12
"""Characters of a stream that are tokenized at once: what is read after the last sequence is not used."""
DRAWN_BYTES = 6
"""Memory of each character of the pieces that are drawn, and of its tokens."""
TOKEN_CHARACTERS = 3
"""Characters of a token, fewer than in most languages."""
FILE_FACTOR = 4
"""Memory of the objects of a .json file, which is read whole, for each of its bytes."""


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

    Text is tokenized without special tokens, joined (`join`) and cut from its start (`windows`); without packing, each
    sequence is the start of one document. prefix: tokens that every sequence begins with; they count in `length`. The
    calibration part takes sequences at random without replacement, the same ones for the same `seed`; of a large text,
    from pieces that are drawn before they are tokenized (`POOL`); of `mixed`, the first ones. The test part takes the
    first ones in order, and all of a text that has fewer. `sequences=None` takes every sequence in order; text always
    needs a `length`. The parts of a divided text are disjoint (`TextShare`). A .npy file holds ids ([n, m], integers):
    its first `sequences` rows and first `length` columns are taken, or all of them for None; `tokenizer`, `seed` and
    `prefix` are ignored.

    Raises `CalibrationError` when the source cannot provide the sequences.
    """
    source = as_source(source)
    for name, count in (("sequences", sequences), ("length", length)):
        if count is not None and count < 1:
            raise CalibrationError(f"{part}: {name} is {count}; use 1 or more")
    if source.stored:
        ids, share = _stored_ids(source, part, sequences, length)
        return ids, TextUse.of_examples(source.label, part, Examples.of_ids(ids)).model_copy(update={"share": share})
    if length is None:
        raise CalibrationError(f"{part}: length is missing; {source.label} text needs one, such as length 2048")
    if tokenizer is None:
        raise CalibrationError(
            f"{part}: {source.label} text needs a tokenizer, and the model has none; use ids in a .npy file"
        )
    reading = TextReading(source, part, tokenizer, length, tuple(prefix), _share(source, part, tokenizer), seed)
    if sequences is None or part == "test" or source.is_ordered or source.streaming:
        cut, tokens, tally = reading.first(sequences)
        reading.check(cut, tokens, tally.documents, sequences)
    else:
        pool, tokens, tally = reading.drawn(sequences, seed)
        reading.check(pool, tokens, tally.documents, sequences)
        cut = pool[torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))[:sequences]]
    use = TextUse(
        text=source.label,
        part=part,
        sequences=len(cut),
        length=length,
        sha256=tally.digest.hexdigest(),
        documents=tally.documents,
        skipped=tally.rows - tally.documents,
        tokens=tokens,
        forms=sorted(tally.forms),
        template=template_name(source, tally),
        packing=source.packing,
        max_tokens_per_document=source.max_tokens_per_document,
        bos=len(prefix) > 0,
        share=reading.share,
        streamed=source.streaming,
    )
    return cut.long(), use


def _share(source: TextSource, part: Part, tokenizer: PreTrainedTokenizerBase) -> TextShare | None:
    """The share of a divided text that a part reads; its rows and characters are counted first."""
    if not source.divided:
        return None
    if source.streaming:
        return TextShare.of_stream(part)
    tally = TextTally()
    for _ in read_pieces(source, part, tokenizer, tally):
        pass
    if tally.rows == 1:
        return TextShare.of_part(part, tally.characters, "characters")
    return TextShare.of_part(part, tally.rows, "documents" if tally.rows == tally.documents else "rows")


Cut = tuple[Int[Tensor, "all length"], int | None, TextTally]
"""Sequences, the number of tokens that they were cut from if those are all of the text, and what was read."""


@dataclass(frozen=True)
class TextReading:
    """How a text is read, tokenized and cut into sequences, in bounded memory.

    Attributes:
        source: The text.
        part: Calibration or test.
        tokenizer: Its tokenizer.
        length: Tokens of a sequence.
        prefix: Tokens that every sequence begins with.
        share: The share of the text that is read; None for all.
        seed: Of the choice of files, for the calibration part of a stream.
    """

    source: TextSource
    part: Part
    tokenizer: PreTrainedTokenizerBase
    length: int
    prefix: tuple[int, ...]
    share: TextShare | None
    seed: int = 0

    @property
    def limit(self) -> int | None:
        """The most tokens that are read of a document."""
        limit = self.source.max_tokens_per_document
        return limit if self.source.packing else limit or max(self.length, PIECE)

    def first(self, count: int | None) -> Cut:
        """Return the first sequences; only their text is tokenized, and only it is read of a stream.

        count: None for all.
        """
        tally = TextTally()
        pieces = self._pieces(tally)
        if self.source.streaming:
            return *self.rows(encode(pieces, self.tokenizer, self.limit, STREAMED), count), tally
        encoded = encode(pieces, self.tokenizer, self.limit)
        rows, tokens = self.rows(encoded, count)
        complete = next(encoded, None) is None
        for _ in pieces:  # for the digest
            complete = False
        return rows, tokens if complete else None, tally

    def drawn(self, count: int, seed: int) -> Cut:
        """Return the sequences of pieces that are drawn at random before they are tokenized: more than `count`."""
        characters, limit = pool_characters(count * self.length), self.limit
        tokens_read = limit if self.source.packing else self.length
        while True:
            tally = TextTally()
            most = None if tokens_read is None else max(PIECE, tokens_read * characters // (count * self.length))
            pool = draw(self._pieces(tally), characters, seed, most)
            rows, tokens = self.rows(encode(pool.runs, self.tokenizer, limit), None)
            if len(rows) >= count or not pool.partial:
                return rows, None if pool.partial else tokens, tally
            characters *= 4

    def _pieces(self, tally: TextTally) -> Iterator[Piece]:
        return shared(read_pieces(self.source, self.part, self.tokenizer, tally, self.seed), self.share)

    def rows(
        self, encoded: Iterator[tuple[int, list[int]]], count: int | None
    ) -> tuple[Int[Tensor, "all length"], int]:
        """Return the sequences, and the number of tokens that were read for them. count: the most; None for all."""
        if self.source.packing:
            stream = stream_of(join(encoded, self.tokenizer), None if count is None else count * self.length)
            return windows(stream, self.length, self.prefix)[:count], len(stream)
        rows, tokens = [], 0
        for _, parts in groupby(encoded, key=lambda item: item[0]):
            ids = [token for _, part in parts for token in part]
            begun = ids if ids[: len(self.prefix)] == list(self.prefix) else [*self.prefix, *ids]
            tokens += len(ids)
            if len(begun) >= self.length:
                rows.append(begun[: self.length])
            if len(rows) == count:
                break
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, self.length), tokens

    def check(self, cut: Int[Tensor, "all length"], tokens: int | None, documents: int, sequences: int | None) -> None:
        """Raise CalibrationError when there are too few sequences; only the evaluation takes fewer of packed text."""
        part, length, name = self.part, self.length, self.source.label
        name += "" if self.share is None else f" ({self.share.text}; the other part of the run reads the rest)"
        if not self.source.packing and len(cut) < (sequences or 1):
            raise CalibrationError(
                f"{part}: {len(cut)} of the {documents} documents of {name} have {length} tokens or more, but "
                f"sequences is {sequences}; use a shorter length, fewer sequences, packing: true, or more documents"
            )
        if len(cut) == 0:
            raise CalibrationError(
                f"{part}: {name} text has {tokens} tokens, fewer than one sequence of {length}; "
                f"use a shorter length, or another source"
            )
        if sequences is not None and part == "calibration" and len(cut) < sequences:
            raise CalibrationError(
                f"{part}: {name} text has {len(cut)} sequences of {length} tokens, but sequences is {sequences}; "
                f"use sequences <= {len(cut)}, a shorter length, or another source"
            )


def pool_characters(tokens: int) -> int:
    """The characters of the pieces from which calibration sequences of so many tokens are drawn."""
    return max(POOL, tokens * POOL_CHARACTERS)


def reading_bytes(source: TextSource, part: Part, sequences: int | None, length: int | None) -> int:
    """Estimate the memory in which a text is read and cut into sequences, beyond that for a text of `POOL` characters.

    That is 35 MB, measured with a byte-level tokenizer, and part of the memory of libraries. The ids of a sequence take
    8 bytes each in the text, in the sequence and in the example that it becomes.

    Raises:
        CalibrationError: for a file that cannot be read.
    """
    check_source(source, part)
    count, width = extent(source, part, sequences, length)
    if source.stored or source.sampled:
        return 3 * 8 * count * width
    size_bytes = Path(str(source.source)).stat().st_size if source.is_file else pool_characters(count * width)
    whole_file = FILE_FACTOR * size_bytes if Path(str(source.source)).suffix == ".json" else 0
    if part == "calibration" and count and not source.streaming:
        return DRAWN_BYTES * max(0, min(size_bytes, pool_characters(count * width)) - POOL) + whole_file
    return 3 * 8 * (count * width or size_bytes // TOKEN_CHARACTERS) + whole_file


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


def extent(source: str | TextSource, part: Part, sequences: int | None, length: int | None) -> tuple[int, int]:
    """(sequences, length) that `token_ids` will return; 0: unknown before the text is read. Raises CalibrationError."""
    source = as_source(source)
    if source.stored and (sequences is None or length is None):
        rows, columns = _stored(source).shape
        share = share_of(source, part, rows)
        return share.stop - share.start if sequences is None else sequences, columns if length is None else length
    return sequences or 0, length or 0


def _stored(source: TextSource) -> np.ndarray:
    """Return the integers [n, m] that a program gives, or memory-map those of a .npy file."""
    if isinstance(source, GivenText) and source.data.ids is not None:
        return source.data.ids
    path = source.label
    check_file(Path(path))
    try:
        stored = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or error
        raise CalibrationError(f"calibration: cannot read {path}: {reason}; {OFFLINE}") from error
    except (ValueError, EOFError) as error:
        raise CalibrationError(
            f"calibration: {path} is not a plain .npy array ({error}); write integers with numpy.save"
        ) from error
    if not isinstance(stored, np.ndarray):
        stored.close()
        raise CalibrationError(f"calibration: {path} holds several arrays (.npz); write one array with numpy.save")
    if stored.ndim != 2 or not np.issubdtype(stored.dtype, np.integer):
        raise CalibrationError(
            f"calibration: {path} holds {stored.dtype} of shape {list(stored.shape)}; "
            f"write an integer array of shape [sequences, length]"
        )
    return stored


def _check_shape(source: TextSource, part: Part, sequences: int | None, length: int | None) -> tuple[TextShare, int]:
    """Return the rows and the number of columns that are taken from a .npy file.

    Raises:
        CalibrationError: if the file is smaller. The evaluation of a divided file takes fewer rows, as of other texts.
    """
    path = source.label
    rows, columns = shape = _stored(source).shape
    share = share_of(source, part, rows)
    available = share.stop - share.start
    count, width = available if sequences is None else sequences, columns if length is None else length
    if source.divided and part == "test":
        count = min(count, available)
    if 0 in shape:
        raise CalibrationError(
            f"calibration: {path} holds no tokens (shape {list(shape)}); write an integer array of shape "
            f"[sequences, length], or use another source"
        )
    if count > available or width > columns or not available:
        divided = f"; {part} reads {share.text}, because it is divided" if source.divided else ""
        raise CalibrationError(
            f"calibration: {path} holds {rows} sequences of {columns} tokens, but {count} sequences of {width} "
            f"are requested{divided}; use sequences <= {available} and length <= {columns}, or another source"
        )
    return share.model_copy(update={"stop": share.start + count}), width


def _stored_ids(
    source: TextSource, part: Part, sequences: int | None, length: int | None
) -> tuple[Int[Tensor, "sequences length"], TextShare | None]:
    """Read the first rows and columns of the share of an integer .npy file; None takes all."""
    path = source.label
    share, width = _check_shape(source, part, sequences, length)
    ids = torch.from_numpy(_stored(source)[share.start : share.stop, :width].astype(np.int64))
    if int(ids.min()) < 0:
        row, column = (ids < 0).nonzero()[0].tolist()
        raise CalibrationError(
            f"calibration: {path} holds {int(ids[row, column])} at [{share.start + row}, {column}]; write ids >= 0"
        )
    return ids, share if source.divided else None


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
        examples, share = listed_sample(model, tokenizer, source, part, count, length, seed)
        facts = {"documents": share.of, "tokens": examples.tokens, "share": share if source.divided else None}
        return examples, TextUse.of_examples(source.label, part, examples).model_copy(update=facts)
    if source.stored:
        ids, use = sample(source, part, None, count, length, seed)
        form = SequenceForm(model, (), tuple(text_lengths(adapter_of(model).texts, ids.shape[1])))
    else:
        form = form_of(model, needs_tokenizer(tokenizer, part), source, part, length)
        ids, use = sample(source, part, tokenizer, count, form.length, seed, form.prefix)
    check_vocabulary(ids, model, source, part)
    return form.examples(ids), use


@dataclass(frozen=True)
class SequenceForm:
    """How the tokens of a text become sequences of a model.

    Attributes:
        model: The model; it may be without weights.
        prefix: Tokens that every sequence of the text begins with.
        lengths: Tokens of each text of a sequence, without those around it.
        around: Tokens before and after each text of a sequence.
    """

    model: PreTrainedModel
    prefix: tuple[int, ...]
    lengths: tuple[int, ...]
    around: tuple[Sequence[int], Sequence[int]] = ((), ())

    @property
    def length(self) -> int:
        """The tokens of a text that a sequence takes, with the prefix."""
        return sum(self.lengths)

    def examples(self, ids: Int[Tensor, "sequences length"]) -> Examples:
        """Return the examples of rows of so many tokens."""
        start, end = (torch.tensor(side, dtype=ids.dtype).expand(len(ids), -1) for side in self.around)
        texts = [torch.cat([start, text, end], dim=1) for text in ids.split(self.lengths, dim=1)]
        return adapter_of(self.model).examples(self.model, texts)


def form_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: TextSource,
    part: Part,
    length: int | None,
) -> SequenceForm:
    """Return how a text that is tokenized becomes sequences of `length` tokens (`model_sample`)."""
    kind = adapter_of(model)
    if length is None:
        raise CalibrationError(f"{part}: length is missing; {source.label} text needs one, such as length 2048")
    lengths = text_lengths(kind.texts, length)
    if kind.streams:
        return SequenceForm(model, tuple(opening_tokens(source, tokenizer, part)), tuple(lengths))
    around = special_tokens_around(tokenizer)
    return SequenceForm(model, (), tuple(n - sum(map(len, around)) for n in lengths), around)


def check_vocabulary(
    ids: Int[Tensor, "sequences length"], model: PreTrainedModel, source: TextSource, part: Part
) -> None:
    """Raises CalibrationError when the model does not know an id."""
    size = vocabulary_size(model)
    if int(ids.max()) < size:
        return
    most = f"the token id {int(ids.max())}, but the model's vocabulary has {size}"
    if source.stored:
        raise CalibrationError(
            f"{part}: {source.label} holds {most}; use ids that were made with the model's own tokenizer"
        )
    raise CalibrationError(
        f"{part}: the tokenizer turns {source.label} into {most}: it has tokens that the model does not know; use the "
        "tokenizer that belongs to the model, or a text without these tokens"
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
        _check_shape(source, part, count, length)
    kind, around = adapter_of(model), [0]
    is_bounded, texts = not kind.streams, kind.texts
    if source.bos is not None and is_bounded:
        raise CalibrationError(f"{part}: bos has no effect: {described(model)}; leave it out")
    if needed is not None and not (is_bounded and source.sampled):
        if source.conversations:
            around = [len(turns_of(needed).opening)]
        else:
            added = special_tokens_around(needed) if is_bounded else [opening_tokens(source, needed, part)]
            around = [len(tokens) for tokens in added]
    if length is not None and text_lengths(texts, length)[-1] <= sum(around):
        raise CalibrationError(
            f"{SECTIONS[part]}: length {length} has no room for text next to the special tokens; use a larger length"
        )
    limit, tokens = source.max_tokens_per_document, extent(source, part, count, length)[1]
    if not source.packing and limit is not None and limit + sum(around) < tokens:
        raise CalibrationError(
            f"{part}: no document of {source.label} fills a sequence of {tokens} tokens, because "
            f"max_tokens_per_document is {limit}; use a shorter length, or packing: true"
        )
    longest = most_tokens(model)
    if longest is not None and longest < tokens:
        raise CalibrationError(
            f"{SECTIONS[part]}: length {tokens} exceeds the model's {longest} positions; use length <= {longest}"
        )
    if tokens == 1:
        raise CalibrationError(
            f"{part}: {source.label} has one token per sequence, but a loss needs 2; use length >= 2"
        )
