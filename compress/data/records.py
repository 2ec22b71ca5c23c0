"""What a report says of texts: their use in a run, and a sketch of the calibration tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from compress.data.pieces import TextShare

if TYPE_CHECKING:
    from compress.models.kinds.batch import Examples


class TextUse(BaseModel):
    """The use of a text in a run, for its report.

    part: calibration or test. sequences, length: of the chosen examples; the most tokens of one. sha256: of the
    documents of the whole text; of those that were read, if it is streamed; of examples that are stored, sampled
    or listed. documents: the number of the documents of `sha256`, None for stored or sampled ids. tokens: those that
    sequences were chosen from, None if the text was not tokenized whole; of lists those of the chosen examples. forms,
    template, skipped: as `Texts`. bos: whether each sequence begins with the beginning-of-sequence token that `sample`
    was given. share: the share of a divided text that was read. streamed: whether reading ended with the last sequence.
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
    share: TextShare | None = None
    streamed: bool = False

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


class CalibrationSketch(BaseModel):
    """Hashes of runs of the calibration tokens, as a report stores them.

    Attributes:
        run: Tokens of a run.
        one_in: The hashes are those that this number divides: so many runs have one hash.
        hashes: Sorted, 8 bytes each, little-endian, in base 64.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: int
    one_in: int
    hashes: str
