"""The text of a training as a stream: sequences are read and tokenized when a step needs them.

The position in the stream can be stored, so that a killed training reads on where it stopped.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.data.dataset_rows import END, RowStream
from compress.data.ids import STREAMED, SequenceForm, TextReading, check_vocabulary, form_of
from compress.data.opening import needs_tokenizer
from compress.data.pieces import Piece, TextShare, pieces_of, shared
from compress.data.sources import row_reader
from compress.data.text_source import TextSource
from compress.data.tokenization import encode, join, stream_of
from compress.errors import CalibrationError
from compress.models.kinds.batch import Examples

GOLDEN = (math.sqrt(5) - 1) / 2
"""Step of the fractions by which the texts of a mixture take turns: the fractional parts of its multiples are spread
evenly (Weyl 1916), so every run of sequences has nearly the shares of the weights."""


@dataclass(frozen=True)
class HoldOut:
    """The documents that a training does not read: a fraction of all, chosen by the sha256 of each.

    Attributes:
        fraction: The fraction.
        is_wanted: Whether these documents are read instead of the others.
    """

    fraction: float = 0.0
    is_wanted: bool = False

    def admits(self, piece: Piece) -> bool:
        """Return whether the document that begins with a piece is read."""
        digest = hashlib.sha256(piece.text.encode("utf-8", "surrogatepass")).digest()
        # not the first byte, by which a stream is divided between calibration and evaluation (`shared`)
        return (int.from_bytes(digest[1:5], "big") < self.fraction * 2**32) == self.is_wanted


class TokenStream:
    """The sequences of tokens of one text.

    Documents are read whole, a few at a time. At the end of the text it begins again, and the last tokens are joined
    with the first document.
    """

    def __init__(self, reading: TextReading, hold_out: HoldOut, rank: int, processes: int) -> None:
        self._reading, self._hold_out, self._rank = reading, hold_out, rank
        self._rows = RowStream(reading.source, reading.seed, rank, processes)
        self._reader = row_reader(reading.source, reading.tokenizer)
        self._numbers = {"sequences": 0, "documents": 0, "tokens": 0, "sequences_before": 0}
        self._sha256 = ""
        self._unused = torch.empty(0, dtype=torch.int32)

    def sequence(self) -> Int[Tensor, " length"]:
        """Return the next sequence. Raises CalibrationError if all rows hold fewer tokens than one."""
        length, begin = self._reading.length, torch.tensor(self._reading.prefix, dtype=torch.int32)
        while len(self._unused) < length:
            self._read()
        if not self._reading.source.packing or self._unused[: len(begin)].equal(begin):
            begin = begin[:0]
        used = length - len(begin)
        row, self._unused = torch.cat([begin, self._unused[:used]]).long(), self._unused[used:]
        self._numbers["sequences"] += 1
        self._sha256 = hashlib.sha256(self._sha256.encode() + row.numpy().astype("<i8").tobytes()).hexdigest()
        return row

    def _read(self) -> None:
        """Read and tokenize documents of at least `STREAMED` characters, or the last ones of a round."""
        reading, documents_before, pieces, characters = self._reading, self._numbers["documents"], [], 0
        while characters < STREAMED:
            row = next(self._rows, END)
            if row is END and not pieces:
                self._begin_again()
            if row is END:
                break
            if self._reader.is_blank(row):
                continue
            text = self._reader.document(row, f"{reading.source.label}: a row of its stream").text
            document = list(shared(pieces_of(self._numbers["documents"], [text]), reading.share))
            if document and self._hold_out.admits(document[0]):
                pieces += document
                characters += len(text)
                self._numbers["documents"] += 1
        encoded = encode(pieces, reading.tokenizer, reading.limit)
        if reading.source.packing:
            ids = stream_of(join(encoded, reading.tokenizer, documents_before - 1 if documents_before else None))
            self._numbers["tokens"] += len(ids)
        else:
            rows, tokens = reading.rows(encoded, None)
            ids = rows.flatten().int()
            self._numbers["tokens"] += tokens
        self._unused = torch.cat([self._unused, ids])

    def _begin_again(self) -> None:
        """Begin the next round. Raises CalibrationError if the last one had no sequence."""
        numbers, reading = self._numbers, self._reading
        if numbers["sequences"] == numbers["sequences_before"]:
            share = "" if reading.share is None else f" ({reading.share.text})"
            part = f"the part of process {self._rank} of " if self._rank else ""
            raise CalibrationError(
                f"calibration: {part}the stream {reading.source.label}{share} has {numbers['documents']} documents and "
                f"no sequence of {reading.length} tokens; use a shorter length, packing: true, more documents, or "
                "fewer processes"
            )
        numbers["sequences_before"] = numbers["sequences"]
        self._rows.begin_again()

    @property
    def round(self) -> int:
        """The number of times that the text has ended."""
        return self._rows.round

    def use(self) -> dict[str, Any]:
        """Return what was read so far, as the values of a `results.result.StreamRecord`."""
        numbers = {name: self._numbers[name] for name in ("sequences", "documents", "tokens")}
        place = {"text": self._reading.source.label, "rank": self._rank, "rounds": self.round + 1}
        return place | numbers | {"sha256": self._sha256}

    def state(self) -> dict[str, Any]:
        """Return the position: JSON values, and the tokens that were read and not used."""
        position = {"rows": self._rows.state(), "numbers": dict(self._numbers), "sha256": self._sha256}
        return position | {"unused": self._unused.clone()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Move to a position that `state` returned."""
        self._rows.resume(state["rows"])
        self._numbers, self._sha256, self._unused = dict(state["numbers"]), state["sha256"], state["unused"]


class SequenceStream:
    """The sequences of the texts of a training, in one of its processes."""

    def __init__(
        self, texts: Sequence[tuple[TokenStream, SequenceForm, TextSource]], weights: Sequence[float], seed: int
    ):
        self._texts, self._offset = texts, seed * GOLDEN % 1
        total = sum(weights)
        self._bounds = [bound / total for bound in accumulate(weights)][:-1]

    def examples(self, numbers: Sequence[int]) -> Examples:
        """Return the next sequences. numbers: of them among those of all processes, which choose the texts."""
        rows = []
        for number in numbers:
            text, form, source = self._texts[bisect(self._bounds, (self._offset + (number + 1) * GOLDEN) % 1)]
            ids = text.sequence()[None]
            check_vocabulary(ids, form.model, source, "calibration")
            rows += form.examples(ids)
        return Examples(tuple(rows))

    @property
    def rounds(self) -> dict[str, int]:
        """The number of times that each text has ended, by its name."""
        return {source.label: text.round for text, _, source in self._texts}

    def uses(self) -> list[dict[str, Any]]:
        """Return what was read of each text so far."""
        return [text.use() for text, _, _ in self._texts]

    def state(self) -> list[dict[str, Any]]:
        """Return the positions in the texts (`TokenStream.state`)."""
        return [text.state() for text, _, _ in self._texts]

    def resume(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Move to positions that `state` returned."""
        for (text, _, _), state in zip(self._texts, states, strict=True):
            text.resume(state)


@dataclass(frozen=True)
class TrainingText:
    """The texts of a training, all of them streams, which nobody has opened yet.

    Attributes:
        sources: The texts.
        weights: The weight of each in the mixture.
        model: The model that reads them; it may be without weights.
        tokenizer: Its tokenizer.
        sequences: Those of the calibration; the fraction that a training holds out is one of them.
        length: Tokens of a sequence.
        seed: Of the choice of files, and of the turns of the texts.
    """

    sources: tuple[TextSource, ...]
    weights: tuple[float, ...]
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    sequences: int
    length: int
    seed: int

    def record(self) -> dict[str, Any]:
        """Return JSON values on which the sequences depend."""
        texts = [source.model_dump(mode="json", include=set(TextSource.model_fields)) for source in self.sources]
        numbers = {"sequences": self.sequences, "length": self.length, "seed": self.seed}
        return {"texts": texts, "weights": self.weights, **numbers}

    def opened(self, rank: int = 0, processes: int = 1, hold_out: float = 0.0) -> SequenceStream:
        """Return the sequences of one process from the start, without the documents that are held out.

        Raises:
            CalibrationError: for a data set that cannot be opened.
        """
        return self._opened(rank, processes, HoldOut(hold_out))

    def held_out(self, fraction: float) -> Examples:
        """Return sequences of the documents that are held out, at least one, the same in every process."""
        count = max(1, round(fraction * self.sequences))
        return self._opened(0, 1, HoldOut(fraction, is_wanted=True)).examples(range(count))

    def _opened(self, rank: int, processes: int, hold_out: HoldOut) -> SequenceStream:
        texts, tokenizer = [], needs_tokenizer(self.tokenizer, "calibration")
        for source in self.sources:
            form = form_of(self.model, tokenizer, source, "calibration", self.length)
            share = TextShare.of_stream("calibration") if source.divided else None
            reading = TextReading(source, "calibration", tokenizer, form.length, form.prefix, share, self.seed)
            texts.append((TokenStream(reading, hold_out, rank, processes), form, source))
        return SequenceStream(texts, self.weights, self.seed)
