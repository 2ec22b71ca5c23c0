"""Draw the figures of the pages from the tables of docs/results.md and `compress/recipe/measured.yaml`.

`make docs` writes them into docs/images/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compress.recipe.measured import Row, measured
from compress.report.charts import BAD, MAIN, PAGE, QUIET, RULE, TEXT, TITLE, Chart, Margins, name_axes, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results.md"
IMAGES = Path(__file__).parent / "images"
QUANTIZED = ("quantized", "three bits", "two bits")
"""Tables of `measured.yaml` whose rows have bits per weight."""
WORST = 150.0
"""Rows of a larger perplexity are left out."""


def table(heading: str) -> list[dict[str, str]]:
    """Return the rows of the first table below a heading of docs/results.md, by column."""
    text = RESULTS.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    head, *rows = ([cell.strip() for cell in line.split(" | ")] for line in lines if not line.startswith("-"))
    return [dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)]


def number_of(cell: str) -> float:
    """Return the number at the start of a cell, without marks."""
    return float(re.sub(r"[^0-9.+-]", "", cell.split()[0]))


@dataclass(frozen=True)
class Series:
    """Points of one program or kind of method.

    Attributes:
        points: (x, y, name of the point).
        line: the points are connected.
    """

    name: str
    points: Sequence[tuple[float, float, str]]
    color: str
    line: bool = False


@dataclass(frozen=True)
class SizeChart(Chart):
    """Perplexity over size, with a logarithmic axis of perplexities.

    Attributes:
        base: (perplexity of the uncompressed model, its name).
    """

    series: Sequence[Series]
    base: tuple[float, str]
    x_name: str
    y_name: str
    ticks: Sequence[float]

    @property
    def size(self) -> tuple[float, float]:
        return 640, 300

    @property
    def margins(self) -> Margins:
        return Margins(54, 30, 34, 44)

    def draw(self, axes: Axes) -> None:
        axes.set_yscale("log")
        axes.axhline(self.base[0], color=QUIET, dashes=(4, 2.5))
        place = (0, self.base[0]), (4, 5), ("axes fraction", "data"), "offset points"
        axes.annotate(f"{self.base[1]}: {self.base[0]:g}", *place, color=QUIET, size=10)
        right = 0.0
        for series in reversed(self.series):
            if series.line:
                axes.plot(*zip(*((x, y) for x, y, _ in series.points), strict=True), color=series.color)
            for x, y, name in series.points:
                gid = f"{TITLE}{series.name}, {name}: {y:g}"
                axes.plot([x], [y], "o", markersize=6, color=series.color, gid=gid)
            axes.annotate(
                series.name,
                (1, 1),
                (-right, 14),
                "axes fraction",
                "offset points",
                ha="right",
                color=series.color,
                weight="bold",
                size=11,
            )
            right += 6.4 * len(series.name) + 18
        for x, y, name in self.series[0].points:
            if name:
                place = (x, y), (0, -17), "data", "offset points"
                box = {"facecolor": PAGE, "edgecolor": "none", "pad": 1.5}
                axes.annotate(name, *place, ha="center", color=TEXT, size=9, bbox=box)
        axes.minorticks_off()
        axes.set_yticks(list(self.ticks), [f"{tick:g}" for tick in self.ticks])
        axes.grid(axis="y", color=RULE, linewidth=1)
        name_axes(axes, self.x_name, self.y_name)


@dataclass(frozen=True)
class BarChart(Chart):
    """Bars from the top to the bottom, each with its value.

    Attributes:
        bars: (name, value, color).
    """

    bars: Sequence[tuple[str, float, str]]
    x_name: str

    @property
    def size(self) -> tuple[float, float]:
        return 460, 26 * len(self.bars)

    @property
    def margins(self) -> Margins:
        return Margins(220, 50, 10, 40)

    def draw(self, axes: Axes) -> None:
        for i, (name, value, color) in enumerate(self.bars):
            axes.barh([i], [value], height=0.62, color=color, gid=f"{TITLE}{name}: {value:g}")
            place = (0, i), (-8, 0), "data", "offset points"
            axes.annotate(name, *place, ha="right", va="center", color=TEXT, size=11)
            place = (value, i), (6, 0), "data", "offset points"
            axes.annotate(f"{value:g}", *place, va="center", color=TEXT, size=11)
        axes.set_ylim(len(self.bars) - 0.5, -0.5)
        axes.set_yticks([])
        axes.set_xlim(0, 1.02 * max(value for _, value, _ in self.bars))
        axes.grid(axis="x", color=RULE, linewidth=1)
        name_axes(axes, self.x_name, "")


def llamacpp_chart() -> SizeChart:
    """Return file size against perplexity of llama.cpp's quantizer and of `compress` for the same types."""
    rows = table("Against llama.cpp's quantizer")
    columns = {"compress": ("`compress`", MAIN), "llama.cpp, importance matrix": ("with matrix", QUIET)}
    columns["llama.cpp"] = ("llama.cpp", BAD)
    rows.sort(key=lambda row: number_of(row["MB"]))
    series = [
        Series(
            name,
            [
                (number_of(row["MB"]), number_of(row[column]), row["scheme"].strip("`") if name == "compress" else "")
                for row in rows
            ],
            color,
            line=True,
        )
        for name, (column, color) in columns.items()
    ]
    title = "SmolLM2-135M-Instruct as GGUF: perplexity computed by llama.cpp"
    return SizeChart(title, series, (35.77, "unquantized"), "MB of the file", "perplexity", (36, 38, 40, 45, 50))


def methods_chart() -> SizeChart:
    """Return bits per weight against perplexity of all measured chains that quantize."""
    rows = [row for part in measured().tables if part.name in QUANTIZED for row in part.rows]
    rows = [row for row in rows if row.bits is not None and row.perplexity < WORST]
    best = list(frontier(rows))
    others = [row for row in rows if row not in best]
    names = ("best at its size", MAIN, best, True), ("other chains", QUIET, others, False)
    series = [
        Series(name, [(row.bits or math.nan, row.perplexity, label(row)) for row in chosen], color, line)
        for name, color, chosen, line in names
    ]
    title = "All measured chains of passes, SmolLM2-135M-Instruct on WikiText-2"
    base = measured().uncompressed, "uncompressed"
    return SizeChart(title, series, base, "bits per weight", "perplexity", (30, 40, 50, 60, 80, 100))


def label(row: Row) -> str:
    """Return the name of the row's recipe; none at 8 bits, where many rows are equal."""
    return "" if (row.bits or 0) > 5 else row.name.removesuffix("-learned")


def frontier(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield, from the most bits to the fewest, the rows that no smaller row equals."""
    best = math.inf
    for row in sorted(rows, key=lambda row: (row.bits or math.nan, row.perplexity)):
        if row.perplexity < best:
            best = row.perplexity
            yield row


def speed_chart() -> BarChart:
    """Return tokens per second of several programs."""
    rows = table("Speed on a CPU")
    colors = {"compress": MAIN, "llama.cpp": BAD}
    bars = [
        (row["program"], number_of(row["decoding"]), colors.get(row["program"].split(",")[0], QUIET)) for row in rows
    ]
    return BarChart("Decoding SmolLM2-135M on two CPU threads", bars, "tokens per second")


def figures() -> dict[Path, str]:
    """Return the text of every figure."""
    charts = {"llamacpp": llamacpp_chart(), "methods": methods_chart(), "speed": speed_chart()}
    return {IMAGES / f"{name}.svg": picture([chart]).text for name, chart in charts.items()}
