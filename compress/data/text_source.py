"""TextSource: the name of a text and how it becomes token ids, as recipes spell it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, model_validator
from typing_extensions import Self

Part = Literal["calibration", "test"]

HUB_DOCUMENTS = 4096  # enough for 512 sequences of 2048 tokens of web text, and seconds to stream
SPLITS: dict[Part, str] = {"calibration": "train", "test": "test"}
"""The split of a data set that a part reads by default."""

FILES = (".txt", ".jsonl", ".json", ".npy", ".safetensors")
"""Endings of local files of texts, ids and lists."""
SECTIONS: dict[Part, str] = {"calibration": "calibration", "test": "eval"}
"""The section of a recipe that states the texts of a part."""

PYTHON = "python"
"""The source of data that a program passes to `run`; a recipe cannot state the data itself."""

SAMPLING = ("temperature", "max_repetition", "conversations")
"""Options of text that the model samples."""

CHATS = (".jsonl", ".json", "ultrachat")
"""Endings of sources whose documents may be conversations."""


def path_text(value: Any) -> Any:
    """Return a path as text, with the folder of the user in place of `~`; any other value as it is."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return os.path.expanduser(text) if isinstance(text, str) and text.startswith("~") else text


def is_folder(source: Any) -> bool:
    """Return whether the source of a text names a folder: by a slash, so that no built-in name is one."""
    if not isinstance(source, str) or not ("/" in source or "\\" in source):
        return False
    return not Path(source).suffix or Path(source).is_dir()


PathText = Annotated[str | None, BeforeValidator(path_text)]
"""An option of a recipe that may be a path: in Python also a `pathlib.Path`."""


class TextSource(BaseModel):
    """A text: a built-in source, a local file, or a data set of the library `datasets`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kinds: ClassVar[tuple[str, ...]] = ("source", "dataset")
    """The options that name a text; exactly one of them is given."""

    source: PathText = Field(
        default="embedded",
        description="embedded, mixed, wikitext, c4, ultrachat, self, or a .txt, .jsonl, .json or .npy file; for "
        "recordings and pictures a .jsonl, .json or .safetensors file; a folder of data files with a slash, as ./texts",
    )
    dataset: PathText = Field(
        default=None, description="instead of source: a data set by hub id, local folder, or .parquet, .csv, .json file"
    )
    config: str | None = Field(default=None, description="configuration of the data set")
    split: str | None = Field(
        default=None, description="split of the data set; null: train for calibration, test for evaluation"
    )
    streaming: bool = Field(
        default=False,
        description="true: read only as many rows of the data set as the sequences need, for calibration in turns from "
        "several of its files that the seed chooses, for training with steps new ones in every step; false: draw from "
        "its first max_documents rows",
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of the data set on the hub")
    column: str | None = Field(
        default=None, description="column with the text or the messages; null: found by the names of the columns"
    )
    chat_template: PathText = Field(
        default=None, description="file with the chat template (Jinja) of conversations; null: the tokenizer's own"
    )
    max_documents: int | None = Field(
        default=HUB_DOCUMENTS, gt=0, description="rows of the data set that are read, from its start; null: all"
    )
    max_tokens_per_document: int | None = Field(
        default=None, gt=0, description="tokens that are kept of each document, from its start; null: all"
    )
    packing: bool = Field(
        default=True,
        description="true: documents are joined and cut into sequences; false: one document per sequence, cut to its "
        "length, and shorter documents are skipped",
    )
    divided: bool | None = Field(
        default=None,
        description="whether calibration and evaluation read different documents of the text: the evaluation its first "
        "quarter (of one document, of its characters), the calibration the rest; null: if both read this text",
    )
    bos: bool | None = Field(
        default=None,
        description="whether each sequence begins with the beginning-of-sequence token, which counts in its length; "
        "null: if the tokenizer adds one to a text",
    )
    temperature: float = Field(default=1.0, gt=0, description="of sampling, for source: self")
    max_repetition: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="for source: self: sequences are sampled again if a larger share of their runs of 8 tokens "
        "occurred before in them",
    )
    conversations: bool = Field(
        default=False,
        description="for source: self: true: the model writes a user's message and its answer in its chat template, "
        "instead of plain text",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_defaults_in_the_way(cls, values: Any) -> Any:
        """Leave the default source out where another kind of text is given, and the limit of rows of a stream.

        A source that is a folder is a data set.
        """
        if not isinstance(values, dict):
            return values
        if is_folder(source := path_text(values.get("source"))) and values.get("dataset") is None:
            values = {**values, "source": None, "dataset": source}
        if values.get("streaming") is True:
            values = {"max_documents": None, **values}
        has_other_text = any(values.get(kind) is not None for kind in cls.kinds)
        return {"source": None, **values} if has_other_text else values

    @model_validator(mode="after")
    def _possible(self) -> Self:
        given_kinds = [kind for kind in self.kinds if getattr(self, kind) is not None]
        if len(given_kinds) != 1:
            problem = f"{' and '.join(given_kinds)} are given together" if given_kinds else "no text is given"
            raise ValueError(f"{problem}; give one of {', '.join(self.kinds)}")
        for name, reason in self._useless().items():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect: {reason}; remove it")
        if self.streaming and "[" in (self.split or ""):
            raise ValueError(f"streaming is not possible with split {self.split}: a slice needs all rows; remove one")
        return self

    def _useless(self) -> dict[str, str]:
        """Return the options without effect on this text, with the reason."""
        if self.dataset is not None or self.source is None:
            return dict.fromkeys(SAMPLING, f"{self.label} is not sampled")
        of_data_sets = f"it is an option of data sets, and the source is {self.source}"
        names = ("config", "split", "streaming", "revision", "max_documents")
        reasons: dict[str, str] = dict.fromkeys(names, of_data_sets)
        if not self.source.endswith(CHATS):
            reasons |= dict.fromkeys(("column", "chat_template"), f"{self.source} has no rows with columns")
        elif self.source == CHATS[-1]:
            reasons |= {"column": f"the columns of {self.source} are known"}
        if not self.is_file and self.source != PYTHON:
            reasons |= {"divided": f"calibration and evaluation read different texts of {self.source} already"}
        if self.stored or self.sampled:
            reasons |= dict.fromkeys(("max_tokens_per_document", "packing"), f"{self.source} has no documents")
        if not self.sampled:
            reasons |= dict.fromkeys(SAMPLING, f"{self.label} is not sampled")
        elif self.conversations:
            reasons |= {"bos": "the chat template says how a conversation begins"}
        if self.stored:
            reasons |= {"bos": f"the ids of {self.source} are not changed"}
        return reasons

    @property
    def is_file(self) -> bool:
        """Whether the text is a local file that is no data set."""
        return self.source is not None and Path(self.source).suffix in FILES

    @property
    def stored(self) -> bool:
        """Whether the text is a .npy file of token ids."""
        return self.source is not None and Path(self.source).suffix == ".npy"

    @property
    def sampled(self) -> bool:
        """Whether the text is sampled from the model itself."""
        return self.source == "self"

    @property
    def is_ordered(self) -> bool:
        """Whether calibration takes the first sequences of the text, whose start holds all of its kinds."""
        return self.source == "mixed"

    @property
    def label(self) -> str:
        """The name of the text in errors and reports."""
        if self.source is not None:
            return self.source
        details = ", ".join(value for value in (self.config, self.split) if value is not None)
        return f"{self.dataset} ({details})" if details else str(self.dataset)

    def split_of(self, part: Part) -> str:
        """The split of the data set that a part reads."""
        return SPLITS[part] if self.split is None else self.split


@dataclass(frozen=True)
class GivenData:
    """Data that a program passes to `run`: rows of texts, or token ids.

    Attributes:
        description: Says what it is, in reports.
        sha256: Digest of the rows or ids, by which data are equal.
        rows: Rows as `forms.RowReader` reads them; None for ids.
        ids: Integers [sequences, length]; None for rows.
    """

    description: str
    sha256: str
    rows: Sequence[Mapping[str, Any]] | None = field(default=None, compare=False)
    ids: np.ndarray | None = field(default=None, compare=False)


class GivenText(TextSource):
    """A text that a program passes to `run`."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    data: InstanceOf[GivenData] = Field(exclude=True)

    @property
    def stored(self) -> bool:
        """Whether the data are token ids."""
        return self.data.ids is not None

    @property
    def label(self) -> str:
        """The description of the data."""
        return self.data.description


def as_source(source: str | TextSource) -> TextSource:
    """The text of a name or path, or the text itself."""
    return source if isinstance(source, TextSource) else TextSource(source=source)
