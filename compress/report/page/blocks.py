"""Blocks: the typed pieces that the sections of a page consist of. Each kind has a template with the name of its class.

Positions across a chart are percentages of its width and positions along its height are pixels, so that a chart fits
every screen and its text keeps its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Tone = Literal["plain", "good", "bad"]


class Block:
    """One piece of a page."""

    @property
    def template(self) -> str:
        """The file of its template."""
        return f"{type(self).__name__.lower()}.html"


@dataclass(frozen=True)
class Lead(Block):
    """The main sentence of the page."""

    text: str


@dataclass(frozen=True)
class Heading(Block):
    """A heading inside of a section, and a note after it."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class Prose(Block):
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Items(Block):
    """A list of sentences."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Code(Block):
    """Text in a monospaced font, line by line."""

    text: str


@dataclass(frozen=True)
class Table(Block):
    """A table; the first column and those in `words` are aligned to the left, others to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Details(Block):
    """Blocks that are shown when their summary is opened."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Entry(Block):
    """A message of the journal and all its places. kind: as in `api.journal.Entry`."""

    kind: str
    message: str
    places: Sequence[str]


@dataclass(frozen=True)
class Pair(Block):
    """Two texts side by side, with their titles."""

    titles: tuple[str, str]
    texts: tuple[str, str]


@dataclass(frozen=True)
class Tile:
    """A figure, its name, and what it was computed from."""

    figure: str
    name: str
    note: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class Tiles(Block):
    """The main figures."""

    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Step:
    """A step of a pipeline: its name, and options as text."""

    name: str
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Steps(Block):
    """The steps of a pipeline in order."""

    steps: Sequence[Step]


@dataclass(frozen=True)
class Bar:
    """A bar. share: its length relative to the longest bar that fits. base: it belongs to the base model."""

    name: str
    share: float
    text: str
    base: bool = False


@dataclass(frozen=True)
class BarGroup:
    """Bars with a common scale."""

    title: str
    note: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Bars(Block):
    """Groups of bars."""

    groups: Sequence[BarGroup]


def before_and_after(title: str, note: str, values: tuple[float, float], texts: tuple[str, str]) -> BarGroup:
    """Two bars: the base model and the compressed one."""
    longest = max(values) or 1.0
    names = ("before", "after")
    bars = [Bar(names[i], values[i] / longest, texts[i], base=i == 0) for i in range(2)]
    return BarGroup(title, note, bars)
