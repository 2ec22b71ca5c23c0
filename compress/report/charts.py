"""Charts: values that matplotlib draws as SVG, once for pages, files and notebooks.

A chart has a fixed size in pixels. Its text stays text, and its colors are those of `COLORS`: `STYLE` maps them to the
dark theme. Equal charts give equal bytes.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from compress.numerics.histogram import Histogram
from compress.report.page.blocks import PageBlock, Tone
from compress.report.page.numbers import number, tick_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "page": ("#fdfdfc", "#14181d"),
    "text": ("#1b1f24", "#e6e9ec"),
    "quiet": ("#56606b", "#a5afba"),
    "rule": ("#dde1e5", "#323a44"),
    "area": ("#c9d0d7", "#46505b"),
    "main": ("#0b63a8", "#66b3f2"),
    "bad": ("#a3430b", "#f3a36a"),
}
"""The colors of charts by use, in the light and in the dark theme; style.css has the same."""
PAGE, TEXT, QUIET, RULE, AREA, MAIN, BAD = (light for light, _ in COLORS.values())
TONES: dict[Tone, str] = {"plain": QUIET, "good": MAIN, "bad": BAD}
STYLE = "\n".join(
    [
        "svg.plot * { stroke-linejoin: round; stroke-linecap: butt; }",
        "svg.plot text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif !important; }",
        "@media screen and (prefers-color-scheme: dark) {",
        *(
            f'  svg.plot [style*="{use}: {light}"] {{ {use}: {dark} !important; }}'
            for light, dark in COLORS.values()
            for use in ("fill", "stroke")
        ),
        "}",
    ]
)
"""CSS of charts. A program without CSS shows the light theme."""
DEFAULTS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "compress",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: text has the same extent on every machine
    "font.size": 11,
    "lines.linewidth": 1.6,
}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
TITLE = "title: "  # begins the id of an element whose text becomes a tooltip
TITLE_HEIGHT = 26  # pixels
MOST_DOTS = 24  # points of a line that show their values
MOST_POINTS = 600  # of a drawn line; a screen shows no more
LEVELS = 7  # cells of a color scale
CHARACTER = 6.6  # pixels of a character at most, on average


class Margins(NamedTuple):
    """Pixels between the edges of a chart and its axes."""

    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True)
class Chart(PageBlock):
    """A chart.

    Attributes:
        title: Its heading.
    """

    title: str

    @property
    def template(self) -> str:
        return "chart.html"

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the axes in pixels."""
        return 270, 130

    @property
    def margins(self) -> Margins:
        """Space for tick labels and names of axes."""
        return Margins(54, 14, 26, 40)

    @property
    def width(self) -> float:
        """Width of the chart in pixels."""
        return self.size[0] + self.margins.left + self.margins.right

    @property
    def height(self) -> float:
        """Height of the chart in pixels, without its title."""
        return self.size[1] + self.margins.top + self.margins.bottom

    @property
    def svg(self) -> str:
        """The chart as part of a page, without its title."""
        text = _svg([self], 1, standalone=False)
        return re.sub(r' xmlns(?::xlink)?="[^"]*"', "", text)

    @abstractmethod
    def draw(self, axes: Axes) -> None:
        """Draw the values into empty axes."""


class Picture:
    """An SVG image, which a notebook shows.

    Attributes:
        text: The SVG.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_svg_(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text


def picture(charts: Sequence[Chart], columns: int = 1) -> Picture:
    """Draw charts with their titles as one image, row by row.

    Args:
        charts: At least one chart.
        columns: Number of charts in a row.
    """
    return Picture(_svg(charts, columns, standalone=True) + "\n")


def _svg(charts: Sequence[Chart], columns: int, standalone: bool) -> str:
    """Draw charts in a grid. Titles and a background are drawn if the image stands alone."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = [charts[i : i + columns] for i in range(0, len(charts), columns)]
    title_height = TITLE_HEIGHT if standalone else 0
    cell_width = max(chart.width for chart in charts)
    heights = [title_height + max(chart.height for chart in row) for row in rows]
    width, height = math.ceil(cell_width * min(columns, len(charts))), math.ceil(sum(heights))
    defaults: dict[Any, Any] = {**matplotlib.rcParamsDefault, **DEFAULTS}
    del defaults["backend"]
    with matplotlib.rc_context(defaults), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a browser has other fonts
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor=PAGE if standalone else "none")
        for i, row in enumerate(rows):
            for j, chart in enumerate(row):
                x, top = cell_width * j, sum(heights[:i])
                if standalone:
                    title = shortened(chart.title, chart.width - 20)
                    y = 1 - (top + 18) / height
                    figure.text((x + 10) / width, y, title, weight="bold", color=TEXT, size=12)
                plot_width, plot_height = chart.size
                bottom = height - top - title_height - chart.margins.top - plot_height
                corner = (x + chart.margins.left) / width, bottom / height
                axes = figure.add_axes((*corner, plot_width / width, plot_height / height), facecolor="none")
                axes.spines[:].set_visible(False)
                axes.tick_params(length=0, labelcolor=QUIET, labelsize=10, pad=6)
                axes.set_axisbelow(True)
                chart.draw(axes)
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata=NO_METADATA)
    title = ", ".join(chart.title for chart in charts)
    return _cleaned(file.getvalue(), width, height, title, STYLE if standalone else "")


def _cleaned(text: str, width: int, height: int, title: str, style: str) -> str:
    """Remove what an element of a page must not have: the prolog, ids, rules for other elements, units of print."""
    text = re.sub(r"\s*\n\s*", " ", text[text.index("<svg") :].rstrip()).replace("> <", "><")
    text = re.sub(rf'<g id="{TITLE}([^"]*)">', r"\n<g><title>\1</title>", text)
    text = re.sub(r' clip-path="[^"]*"', "", text)  # everything is inside of the axes
    text = re.sub(r"\s*<defs>\s*(?:<clipPath.*?</clipPath>\s*)+</defs>", "", text, flags=re.DOTALL)
    referenced = set(re.findall(r'href="#([^"]*)"', text))
    text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in referenced else "", text)
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", f"<style>{style}</style>" if style else "", text, count=1)
    text = text.replace(f'width="{width}pt" height="{height}pt"', f'width="{width}" height="{height}"', 1)
    text = text.replace("<svg", '<svg class="plot"', 1)
    return text.replace(">", f"><title>{escape(title)}</title>", 1) if style else text


def shortened(text: str, width: float) -> str:
    """Cut text that is longer than a width in pixels."""
    count = max(int(width / CHARACTER), 2)
    return text if len(text) <= count else text[: count - 1] + "…"


def name_axes(axes: Axes, x_name: str, y_name: str) -> None:
    """Write the name of the x axis below it, and that of the y axis above it."""
    axes.annotate(x_name, (1, 0), (0, -34), "axes fraction", "offset points", ha="right", color=QUIET)
    axes.annotate(y_name, (0, 1), (0, 10), "axes fraction", "offset points", ha="left", color=QUIET)


def _set_ticks(axis: Any, count: int, integer: bool = False) -> None:
    """Choose round ticks."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(count, integer=integer, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_name(value)))


@dataclass(frozen=True)
class Line:
    """A line through points.

    Attributes:
        name: Its name in the legend.
        points: Pairs (x, y); those with a y that is not finite are left out.
        is_base: It belongs to the base model, or is a reference for the main line.
    """

    name: str
    points: Sequence[tuple[float, float]]
    is_base: bool = False


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Reduce a line to `MOST_POINTS` points: means of neighbours between the first and the last point."""
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
class LineChart(Chart):
    """Lines over one axis.

    Attributes:
        title: Its heading.
        lines: At most one main line and one base line.
        x_name: What the axis counts.
        y_name: The quantity and its unit.
    """

    lines: Sequence[Line]
    x_name: str
    y_name: str

    def draw(self, axes: Axes) -> None:
        right = 0.0
        for line in self.lines:
            points = thinned([(x, y) for x, y in line.points if math.isfinite(y)])
            color = QUIET if line.is_base else MAIN
            x, y = zip(*points, strict=True) if points else ((), ())
            axes.plot(x, y, color=color, dashes=(4, 2.5) if line.is_base else (None, None))
            for x, y in points if len(points) <= MOST_DOTS else ():
                text = f"{TITLE}{line.name}, {self.x_name} {x:g}: {number(y)}"
                axes.plot([x], [y], "o", markersize=4, color=color, gid=text)
            if len(self.lines) > 1:
                place = (1, 1), (-right, 10), "axes fraction", "offset points"
                axes.annotate(line.name, *place, ha="right", color=color, weight="bold", size=10)
                right += CHARACTER * len(line.name) + 14
        axes.margins(x=0, y=0.08)
        axes.grid(axis="y", color=RULE, linewidth=1)
        _set_ticks(axes.xaxis, 5, integer=True)
        _set_ticks(axes.yaxis, 4)
        name_axes(axes, self.x_name, self.y_name)


@dataclass(frozen=True)
class HistogramChart(Chart):
    """A histogram before and after, with a logarithmic axis of counts.

    Attributes:
        title: Its heading.
        histogram: Counts in equal bins; one distribution is drawn if it did not change.
        x_name: The quantity.
    """

    histogram: Histogram
    x_name: str

    def draw(self, axes: Axes) -> None:
        counts_before, counts_after = self.histogram.before, self.histogram.after
        limit, count = self.histogram.limit, len(counts_before)
        edges = [limit * (2 * i / count - 1) for i in range(count + 1)]
        axes.stairs([math.log1p(n) for n in counts_before], edges, fill=True, color=AREA)
        if self.histogram.changed:
            axes.stairs([math.log1p(n) for n in counts_after], edges, color=MAIN, linewidth=1.3)
        most = max([*counts_before, *counts_after, 1])
        powers = [10**i for i in range(2, math.ceil(math.log10(most)) + 1, 2) if 10**i <= most]
        axes.set_yticks([0, *(math.log1p(power) for power in powers)], ["0", *(f"{power:,}" for power in powers)])
        axes.set_xticks([-limit, 0, limit], [f"−{number(limit)}", "0", number(limit)])
        axes.set_xlim(-limit, limit)
        axes.set_ylim(0, 1.05 * math.log1p(most))
        axes.grid(axis="y", color=RULE, linewidth=1)
        name_axes(axes, self.x_name, "values per bin")
        names = (("after", MAIN), ("before", QUIET)) if self.histogram.changed else (("unchanged", QUIET),)
        for i, (name, color) in enumerate(names):
            place = (1, 1), (-44 * i, 10), "axes fraction", "offset points"
            axes.annotate(name, *place, ha="right", color=color, weight="bold", size=10)


@dataclass(frozen=True)
class ChartGrid(PageBlock):
    """Charts next to each other, as many in a row as fit."""

    charts: Sequence[Chart]


@dataclass(frozen=True)
class Interval:
    """A difference with its confidence interval.

    Attributes:
        name: What is compared.
        value: The difference.
        low: Lower end of the interval; None if it is unknown.
        high: Upper end of the interval; None if it is unknown.
        text: The figures.
        note: Further facts.
        tone: The meaning of a significant difference.
    """

    name: str
    value: float
    low: float | None
    high: float | None
    text: str
    note: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True)
class IntervalChart(Chart):
    """Differences over a common axis with a line at zero.

    Attributes:
        title: Its heading.
        rows: From the top to the bottom.
        x_name: The quantity and its unit.
        below: The meaning of negative values.
        above: The meaning of positive values.
    """

    rows: Sequence[Interval]
    x_name: str
    below: str
    above: str

    @property
    def size(self) -> tuple[float, float]:
        return 390, 46 * len(self.rows)

    @property
    def margins(self) -> Margins:
        return Margins(200, 260, 26, 40)

    def draw(self, axes: Axes) -> None:
        axes.axvline(0, color=QUIET, linewidth=1)
        for i, row in enumerate(self.rows):
            color, name_y = TONES[row.tone], 8 if row.note else 0
            for x, (dx, dy), text, text_color, size in (
                (0, (-198, name_y), shortened(row.name, 190), TEXT, 12),
                (0, (-198, -8), shortened(row.note, 210), QUIET, 10),
                (1, (14, 0), row.text, color, 12),
            ):
                place = (x, i), (dx, dy), ("axes fraction", "data"), "offset points"
                axes.annotate(text, *place, va="center", color=text_color, size=size)
            if row.low is not None and row.high is not None:
                axes.plot([row.low, row.high], [i] * 2, color=color, linewidth=2.5)
            axes.plot([row.value], [i], "o", color=color, markersize=8, gid=f"{TITLE}{row.name}: {row.text}")
        values = [x for row in self.rows for x in (row.value, row.low, row.high) if x is not None and math.isfinite(x)]
        extent = max([abs(value) for value in values], default=0.0) or 1.0
        axes.set_xlim(min([0.0, *values]) - 0.12 * extent, max([0.0, *values]) + 0.12 * extent)
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        axes.set_yticks([])
        axes.grid(axis="x", color=RULE, linewidth=1)
        _set_ticks(axes.xaxis, 6)
        name_axes(axes, self.x_name, f"← {self.below}")
        axes.annotate(f"{self.above} →", (1, 1), (0, 10), "axes fraction", "offset points", ha="right", color=QUIET)


@dataclass(frozen=True)
class HeatMap(Chart):
    """Values by row and column as shades of one color.

    Attributes:
        title: Its heading.
        rows: Names of the rows.
        columns: Names of the columns.
        values: A row of values for each name; None where there is no value.
        x_name: What a column counts.
        quantity: The quantity and its unit.
        is_log: The shades follow the logarithm; values that are not positive have the lightest one.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    x_name: str
    quantity: str
    is_log: bool = False

    @property
    def size(self) -> tuple[float, float]:
        return max(min(34.0, max(640 / len(self.columns), 12.0)) * len(self.columns), 120.0), 22.0 * len(self.rows)

    @property
    def margins(self) -> Margins:
        return Margins(24 + min(CHARACTER * max(len(name) for name in self.rows), 180), 120, 8, 64)

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest value; with a logarithm, of the positive values."""
        values = [value for row in self.values for value in row if value is not None and math.isfinite(value)]
        values = [value for value in values if value > 0 or not self.is_log]
        return min(values, default=0.0), max(values, default=0.0)

    def shade(self, value: float) -> float:
        """Opacity of the color of a value, from 0.1 to 1."""
        low, high = self.limits
        if self.is_log and low > 0:
            low, high, value = (math.log(max(x, low)) for x in (low, high, value))
        share = min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.0
        return round(0.1 + 0.9 * share, 3)

    def draw(self, axes: Axes) -> None:
        from matplotlib.patches import Rectangle

        cells = [(i, j, value) for i, row in enumerate(self.values) for j, value in enumerate(row) if value is not None]
        for i, j, value in cells:
            text = f"{TITLE}{self.rows[i]}, {self.x_name} {self.columns[j]}: {number(value)}"
            color = {"facecolor": MAIN, "alpha": self.shade(value) if math.isfinite(value) else 0.0}
            axes.add_artist(Rectangle((j, i), 0.94, 0.92, linewidth=0, gid=text, **color))
        axes.set_xlim(0, len(self.columns))
        axes.set_ylim(len(self.rows), 0)
        axes.set_yticks([i + 0.46 for i in range(len(self.rows))], [shortened(name, 200) for name in self.rows])
        step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if len(self.columns) <= 16 * step)
        ticks = range(0, len(self.columns), step)
        axes.set_xticks([i + 0.47 for i in ticks], [self.columns[i] for i in ticks])
        name_axes(axes, self.x_name, "")
        width, height = self.size
        for i in range(LEVELS):
            corner, size = (15 * i / width, -58 / height), (14 / width, 12 / height)
            color = {"facecolor": MAIN, "alpha": 0.1 + 0.9 * i / (LEVELS - 1)}
            axes.add_artist(Rectangle(corner, *size, transform=axes.transAxes, linewidth=0, **color))
        low, high = map(number, self.limits)
        quantity = f"{self.quantity}, logarithmic scale" if self.is_log else self.quantity
        for x, text, align in ((-6, low, "right"), (15 * LEVELS + 6, f"{high}   {quantity}", "left")):
            axes.annotate(text, (0, 0), (x, -56), "axes fraction", "offset points", ha=align, color=QUIET)


@dataclass(frozen=True)
class Point:
    """A variant in a scatter chart.

    Attributes:
        name: Its label.
        x: Position along the axis that begins at zero.
        y: Position along the other axis.
        error: Half of its error bar.
        text: Its tooltip.
        is_main: It is emphasized, and a line joins it with the other main points.
    """

    name: str
    x: float
    y: float
    error: float
    text: str
    is_main: bool


@dataclass(frozen=True)
class ScatterChart(Chart):
    """Points by two quantities, with error bars.

    Attributes:
        title: Its heading.
        points: At least one point.
        x_name: The quantity and its unit; its axis begins at zero.
        y_name: The quantity and its unit; its axis contains zero.
    """

    points: Sequence[Point]
    x_name: str
    y_name: str

    @property
    def size(self) -> tuple[float, float]:
        return 600, 300

    def draw(self, axes: Axes) -> None:
        main = sorted((point for point in self.points if point.is_main), key=lambda point: point.x)
        axes.plot([point.x for point in main], [point.y for point in main], color=MAIN, dashes=(4, 3), linewidth=1.2)
        right = 1.12 * max(point.x for point in self.points)
        for point in self.points:
            color = MAIN if point.is_main else QUIET
            axes.plot([point.x] * 2, [point.y - point.error, point.y + point.error], color=color)
            axes.plot([point.x], [point.y], "o", markersize=8, color=color, gid=TITLE + point.text)
            side: Literal["left", "right"] = "right" if point.x > 0.7 * right else "left"
            place = (point.x, point.y), (-9, -15) if side == "right" else (9, 6), "data", "offset points"
            axes.annotate(shortened(point.name, 220), *place, ha=side, color=TEXT)
        axes.axhline(0, color=QUIET, linewidth=1)
        axes.margins(y=0.1)
        axes.set_xlim(0, right)
        axes.grid(color=RULE, linewidth=1)
        _set_ticks(axes.xaxis, 6)
        _set_ticks(axes.yaxis, 6)
        name_axes(axes, self.x_name, self.y_name)
