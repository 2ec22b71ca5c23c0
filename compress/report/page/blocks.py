"""Blocks: the typed pieces that the sections of a page consist of.

Each kind has a template with the name of its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Tone = Literal["plain", "good", "bad"]


class PageBlock:
    """One piece of a page."""

    @property
    def template(self) -> str:
        """The file of its template: the name of its class in lowercase."""
        return f"{type(self).__name__.lower()}.html"


@dataclass(frozen=True)
class Lead(PageBlock):
    """The main sentence of the page."""

    text: str


@dataclass(frozen=True)
class Heading(PageBlock):
    """A heading inside of a section, and a note after it."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class Prose(PageBlock):
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Items(PageBlock):
    """A list of sentences."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Code(PageBlock):
    """Text in a monospaced font, line by line."""

    text: str


@dataclass(frozen=True)
class TextTable(PageBlock):
    """A table.

    Attributes:
        head: Names of the columns.
        rows: Cells of each row.
        words: Columns that are aligned to the left, in addition to the first one.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Details(PageBlock):
    """Blocks that are shown when their summary is opened."""

    summary: str
    blocks: Sequence[PageBlock]


@dataclass(frozen=True)
class JournalItem(PageBlock):
    """A message of the journal with all its places.

    Attributes:
        label: 'note', 'warning', or another kind of the journal.
        message: The text.
        places: Where the message was written.
    """

    label: str
    message: str
    places: Sequence[str]


@dataclass(frozen=True)
class Pair(PageBlock):
    """Two texts side by side, with their titles."""

    titles: tuple[str, str]
    texts: tuple[str, str]


@dataclass(frozen=True)
class KeyFigure:
    """A main figure.

    Attributes:
        value: The figure.
        name: What it is.
        note: What it was computed from.
        tone: Its meaning.
    """

    value: str
    name: str
    note: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class KeyFigures(PageBlock):
    """The main figures."""

    figures: Sequence[KeyFigure]


@dataclass(frozen=True)
class PipelineStep:
    """A step of a recipe: its name, and its options as text."""

    name: str
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Pipeline(PageBlock):
    """The steps of a recipe in order."""

    steps: Sequence[PipelineStep]


@dataclass(frozen=True)
class Bar:
    """A bar.

    Attributes:
        name: Its label.
        share: Its length relative to the longest bar that fits.
        text: Its value.
        is_base: It belongs to the base model.
    """

    name: str
    share: float
    text: str
    is_base: bool = False


@dataclass(frozen=True)
class BarGroup:
    """Bars with a common scale."""

    title: str
    note: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Bars(PageBlock):
    """Groups of bars."""

    groups: Sequence[BarGroup]


def before_and_after(title: str, note: str, values: tuple[float, float], texts: tuple[str, str]) -> BarGroup:
    """Make two bars: the base model and the compressed one.

    Args:
        title: Of the group.
        note: After the title.
        values: Of the base model and of the compressed one.
        texts: The values as text.
    """
    longest = max(values) or 1.0
    names = ("before", "after")
    bars = [Bar(names[i], values[i] / longest, texts[i], is_base=i == 0) for i in range(2)]
    return BarGroup(title, note, bars)
