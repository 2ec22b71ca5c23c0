"""Read a text in pieces of bounded size, divide it between calibration and evaluation, and draw some of its pieces."""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from compress.data.text_source import Part

PIECE = 1 << 16
"""The most characters of a piece."""
WORD = 1 << 10
"""Characters before the end of a piece among which a white space is looked for, so that no word is cut."""
EVALUATED = 4
"""The evaluation of a divided text reads its first 1 / EVALUATED, and the calibration reads the rest."""


class Piece(NamedTuple):
    """A part of a document; the pieces of a document follow each other. document: the number of its row."""

    document: int
    text: str


@dataclass
class TextTally:
    """What was read of a text so far.

    rows: with blank ones. documents: without them. characters: of all documents. forms: of the rows. templated: whether
    a chat template made a document of messages (both values may occur). digest: of the documents (UTF-8, with a zero
    byte after each).
    """

    rows: int = 0
    documents: int = 0
    characters: int = 0
    forms: set[str] = field(default_factory=set)
    templated: set[bool] = field(default_factory=set)
    digest: Any = field(default_factory=hashlib.sha256)

    def count(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces, and count them and their documents."""
        for _, document in groupby(pieces, key=lambda piece: piece.document):
            self.documents += 1
            for piece in document:
                self.characters += len(piece.text)
                self.digest.update(piece.text.encode("utf-8", "surrogatepass"))
                yield piece
            self.digest.update(b"\0")


Unit = Literal["documents", "rows", "characters", "digests"]


class TextShare(BaseModel):
    """The share of a text that one part reads: documents, rows, or characters of one document.

    A stream, whose documents are not counted, is divided by digests: a document belongs to one of `of` classes by the
    sha256 of its text (the first piece of it), and the share has the classes from `start` to `stop`.

    Attributes:
        unit: What `start`, `stop` and `of` count.
        start: The first one.
        stop: The one after the last one.
        of: All of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    unit: Unit
    start: int
    stop: int
    of: int

    @classmethod
    def of_stream(cls, part: Part) -> TextShare:
        """Return the share of a part of a stream: about a quarter for the evaluation, the rest for calibration."""
        return cls.of_part(part, EVALUATED, "digests")

    @classmethod
    def of_part(cls, part: Part, count: int, unit: Unit) -> TextShare:
        """Return the share of a part: the first quarter for the evaluation, at least one; the rest for calibration."""
        bound = max(1, count // EVALUATED)
        start, stop = (0, bound) if part == "test" else (bound, max(bound, count))
        return cls(unit=unit, start=start, stop=stop, of=count)

    @property
    def text(self) -> str:
        """The share in words."""
        if self.unit == "digests":
            return f"documents whose digest is in classes {self.start + 1} to {self.stop} of {self.of}"
        return f"{self.unit} {self.start + 1} to {self.stop} of {self.of}"


def pieces_of(number: int, chunks: Iterable[str]) -> Iterator[Piece]:
    """Yield the pieces of a document, at least one; they do not depend on the sizes of the chunks.

    Args:
        number: Of the row of the document.
        chunks: Parts of its text.
    """
    text, count = "", 0
    for chunk in chunks:
        for start in range(0, len(chunk), PIECE):
            text += chunk[start : start + PIECE]
            if len(text) > PIECE:
                end, count = word_start(text, PIECE), count + 1
                yield Piece(number, text[:end])
                text = text[end:]
    if text or not count:
        yield Piece(number, text)


def word_start(text: str, position: int) -> int:
    """Return the last white space before a position, if one is near and not the first character, or the position."""
    start = max(0, position - WORD)
    space = max(text.rfind(character, start, position) for character in " \n\t")
    return space if space > 0 else position


def shared(pieces: Iterable[Piece], share: TextShare | None) -> Iterator[Piece]:
    """Yield the pieces of a share. A piece on the bound of characters is cut before a word."""
    position, document, is_inside = 0, -1, False
    for piece in pieces:
        if share is None:
            yield piece
        elif share.unit == "digests":
            if piece.document != document:
                digest = hashlib.sha256(piece.text.encode("utf-8", "surrogatepass")).digest()
                document, is_inside = piece.document, share.start <= digest[0] % share.of < share.stop
            if is_inside:
                yield piece
        elif share.unit != "characters":
            if share.start <= piece.document < share.stop:
                yield piece
        else:
            cuts = [_cut(piece.text, bound - position) for bound in (share.start, share.stop)]
            position += len(piece.text)
            if text := piece.text[cuts[0] : cuts[1]]:
                yield Piece(piece.document, text)


def _cut(text: str, bound: int) -> int:
    """The place in a piece where a share begins or ends."""
    return min(max(bound, 0), len(text)) if not 0 < bound < len(text) else word_start(text, bound)


@dataclass(frozen=True)
class Drawn:
    """Pieces that were drawn. runs: pieces by run, which is a part of a document. partial: whether text is missing."""

    runs: list[Piece]
    partial: bool


def draw(pieces: Iterable[Piece], characters: int, seed: int, most: int | None = None) -> Drawn:
    """Draw pieces at random until they have about so many characters; the order of the text stays.

    Adjacent pieces of a document are one run. If all pieces fit, the runs are the documents.

    Args:
        pieces: All pieces.
        characters: The most characters; one piece is drawn in any case.
        seed: Of the choice.
        most: Characters that are read of each document; None for all.
    """
    chance, total, partial = random.Random(seed), 0, False
    heap: list[tuple[float, int, Piece, bool]] = []  # the pieces with the smallest random numbers
    length = previous_document = 0
    for index, piece in enumerate(pieces):
        begins = index == 0 or piece.document != previous_document
        length, previous_document = 0 if begins else length, piece.document
        text = piece.text if most is None else piece.text[: max(0, most - length)]
        partial |= len(text) < len(piece.text)
        length += len(piece.text)
        if not text and not begins:
            continue
        heapq.heappush(heap, (-chance.random(), index, Piece(piece.document, text), begins))
        total += len(text)
        while total > characters and len(heap) > 1:
            total -= len(heapq.heappop(heap)[2].text)
            partial = True
    runs: list[Piece] = []
    run, previous = -1, -2
    for index, piece, begins in sorted((index, piece, begins) for _, index, piece, begins in heap):
        run += begins or index != previous + 1
        previous = index
        runs.append(Piece(run, piece.text))
    return Drawn(runs, partial)
