"""Charts: blocks that place values. The templates only draw what is placed here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from compress.numerics.histogram import Histogram
from compress.report.page.blocks import Block, Tone
from compress.report.page.numbers import number, span, tick_name, ticks

LineStyle = Literal["main", "base", "faint"]
MOST_DOTS = 64  # points of a line that show their values
MOST_POINTS = 600  # of a drawn line; a screen shows no more
LEVELS = 7  # colors of a heat map


class Mark(NamedTuple):
    """A place in a chart with its text. x: percent of the width. y: pixels from the top."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Line:
    """A line through points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]
    style: LineStyle = "main"


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most `MOST_POINTS` points: means of neighbours, and the first and the last as they are."""
    if len(points) <= MOST_POINTS:
        return points
    inner, count = points[1:-1], MOST_POINTS - 2
    cuts = [round(i * len(inner) / count) for i in range(count + 1)]
    means = [
        tuple(sum(axis) / (end - begin) for axis in zip(*inner[begin:end], strict=True))
        for begin, end in pairwise(cuts)
    ]
    return [points[0], *((x, y) for x, y in means), points[-1]]


@dataclass(frozen=True)
class LineChart(Block):
    """Lines over one axis. y: the range of values; None: that of the lines. x_name: what the axis counts."""

    title: str
    lines: Sequence[Line]
    x_name: str
    y: tuple[float, float] | None = None
    height: int = 120

    @property
    def named(self) -> list[Line]:
        """The lines of a legend; none where one line has the name of the chart."""
        shown = [line for line in self.lines if line.style != "faint"]
        return shown if len(shown) > 1 else []

    @property
    def x_range(self) -> tuple[float, float]:
        """The least and the largest x."""
        values = [x for line in self.lines for x, _ in line.points] or [0.0]
        return min(values), max(values)

    @property
    def y_range(self) -> tuple[float, float]:
        """The least and the largest y."""
        return self.y or span([y for line in self.lines for _, y in line.points])

    def place(self, x: float, y: float) -> tuple[float, float]:
        """(percent, pixels) of a point."""
        (left, right), (low, high) = self.x_range, self.y_range
        return 100 * (x - left) / (right - left or 1), self.height * (1 - (y - low) / (high - low or 1))

    def path(self, line: Line) -> str:
        """The points of a polyline."""
        places = [self.place(x, y) for x, y in thinned([point for point in line.points if math.isfinite(point[1])])]
        return " ".join(f"{x:.2f},{y:.1f}" for x, y in places)

    def dots(self, line: Line) -> list[Mark]:
        """The points whose values are shown, if they are few."""
        if line.style == "faint" or len(line.points) > MOST_DOTS:
            return []
        return [
            Mark(*self.place(x, y), f"{line.name}, {self.x_name} {x:g}: {number(y)}")
            for x, y in line.points
            if math.isfinite(y)
        ]

    @property
    def levels(self) -> list[Mark]:
        """The ticks of the values."""
        return [
            Mark(0, self.place(self.x_range[0], value)[1], tick_name(value))
            for value in ticks(*self.y_range, 4 if self.height > 100 else 3)
        ]

    @property
    def ends(self) -> tuple[str, str]:
        """The first and the last x as text."""
        left, right = self.x_range
        return f"{left:g}", f"{right:g}"


@dataclass(frozen=True)
class HistogramChart(Block):
    """A histogram before and after on a logarithmic scale of counts; one distribution if it did not change."""

    title: str
    histogram: Histogram
    height: int = 120

    def outline(self, counts: Sequence[int], closed: bool) -> str:
        """The points of the steps of a distribution. closed: with the base line at both ends."""
        most = math.log1p(max(max(self.histogram.before), max(self.histogram.after)))
        width = 100 / len(counts)
        tops = [self.height * (1 - math.log1p(count) / most) if most else self.height for count in counts]
        steps = [(x, y) for i, y in enumerate(tops) for x in (i * width, (i + 1) * width)]
        ends = ([(0.0, float(self.height))], [(100.0, float(self.height))]) if closed else ([], [])
        return " ".join(f"{x:.2f},{y:.1f}" for x, y in [*ends[0], *steps, *ends[1]])

    @property
    def bins(self) -> list[Mark]:
        """Each bin with its counts as text."""
        found, count = self.histogram, len(self.histogram.before)
        width, limit = 100 / count, self.histogram.limit
        return [
            Mark(
                i * width, width, f"around {number(limit * ((2 * i + 1) / count - 1))}: {before} before, {after} after"
            )
            for i, (before, after) in enumerate(zip(found.before, found.after, strict=True))
        ]

    @property
    def limits(self) -> tuple[str, str]:
        """Both ends of the axis."""
        shown = number(self.histogram.limit)
        return f"−{shown}", f"+{shown}"


@dataclass(frozen=True)
class Grid(Block):
    """Charts next to each other, as many in a row as fit. small: they are many and simple."""

    charts: Sequence[Block]
    small: bool = False


@dataclass(frozen=True)
class Interval:
    """A difference with its confidence interval. text: its figures. note: further facts."""

    name: str
    value: float
    low: float | None
    high: float | None
    text: str
    note: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class Intervals(Block):
    """Differences on a common axis with a line at zero. below, above: the meaning of the two sides."""

    rows: Sequence[Interval]
    below: str
    above: str

    @cached_property
    def limits(self) -> tuple[float, float]:
        """The ends of the axis, with zero between them."""
        values = [x for row in self.rows for x in (row.value, row.low, row.high) if x is not None]
        return span([0.0, *values])

    def at(self, value: float) -> float:
        """The place of a value in percent."""
        low, high = self.limits
        return round(100 * (value - low) / (high - low), 2)

    @property
    def marks(self) -> list[Mark]:
        """The ticks of the axis."""
        return [Mark(self.at(value), 0, tick_name(value)) for value in ticks(*self.limits, 4)]


@dataclass(frozen=True)
class Heat(Block):
    """Values by row and column as colors; None: there is no value. unit: what a column counts.

    log: the colors follow the logarithm; values that are not positive have the first color.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    unit: str
    size: int = 18
    log: bool = False

    @cached_property
    def limits(self) -> tuple[float, float]:
        """The least and the largest value; on a logarithmic scale, of the positive ones."""
        known = [value for row in self.values for value in row if value is not None and (value > 0 or not self.log)]
        return min(known, default=0.0), max(known, default=0.0)

    def level(self, value: float) -> int:
        """The color of a value, from 0 to LEVELS - 1."""
        low, high = self.limits
        if self.log and low > 0:
            low, high, value = (math.log(max(x, low)) for x in (low, high, value))
        return min(int(LEVELS * (value - low) / (high - low)), LEVELS - 1) if high > low else 0

    def cells(self, row: int) -> list[tuple[float, float, int, str]]:
        """(percent, width, level, text) of each value of a row."""
        width = 100 / len(self.columns)
        return [
            (i * width, width, self.level(value), f"{self.rows[row]}, {self.unit} {self.columns[i]}: {number(value)}")
            for i, value in enumerate(self.values[row])
            if value is not None
        ]

    @property
    def legend(self) -> tuple[str, str]:
        """The least and the largest value as text."""
        return number(self.limits[0]), number(self.limits[1])

    @property
    def levels(self) -> int:
        """The number of colors."""
        return LEVELS


@dataclass(frozen=True)
class Point:
    """A variant in a scatter chart. error: half of its error bar. main: it is emphasized, and joined by a line."""

    name: str
    x: float
    y: float
    error: float
    text: str
    main: bool


@dataclass(frozen=True)
class Scatter(Block):
    """Points by two quantities, with error bars; a line joins the main ones. The axis of x begins at zero."""

    points: Sequence[Point]
    x_name: str
    y_name: str
    height: int = 280

    @property
    def x_range(self) -> tuple[float, float]:
        """From zero to somewhat more than the largest."""
        return 0.0, 1.12 * max(point.x for point in self.points)

    @property
    def y_range(self) -> tuple[float, float]:
        """With zero, and with all error bars."""
        return span([0.0, *(point.y + sign * point.error for point in self.points for sign in (-1, 1))])

    def place(self, x: float, y: float) -> tuple[float, float]:
        """(percent, pixels) of a point."""
        low, high = self.y_range
        return round(100 * x / self.x_range[1], 2), round(self.height * (1 - (y - low) / (high - low)), 1)

    @property
    def front(self) -> str:
        """The polyline through the main points."""
        ordered = sorted((point for point in self.points if point.main), key=lambda point: point.x)
        return " ".join("{},{}".format(*self.place(point.x, point.y)) for point in ordered)

    @property
    def levels(self) -> list[Mark]:
        """The ticks of y."""
        return [Mark(0, self.place(0, value)[1], tick_name(value)) for value in ticks(*self.y_range, 4)]

    @property
    def marks(self) -> list[Mark]:
        """The ticks of x."""
        return [Mark(self.place(value, 0)[0], self.height, tick_name(value)) for value in ticks(*self.x_range, 4)]
