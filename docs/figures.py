"""Draw the figures of the pages from the tables of docs/results.md and `compress/recipe/measured.yaml`.

`make docs` writes them into docs/images/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
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
POSITIONS = {
    "rtn-int8": "int8",
    "gptq": "gptq, int4",
    "sparsegpt-2:4": "sparsegpt, 2:4",
    "kv-int4-zeros": "4-bit KV cache",
}
"""Rows of the figure of positions, and their names there."""
PROGRAMS = {"compress": MAIN, "compress, int8 inputs": TEXT, "llama.cpp": BAD, "transformers": QUIET}
"""Programs of the figure of speed, and their colors."""
TICKS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
"""Of axes of KL divergences."""
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
    """Loss or speed over size, with a logarithmic axis.

    Attributes:
        base: (loss of the uncompressed model, its name); None where it is 0 by definition.
    """

    series: Sequence[Series]
    base: tuple[float, str] | None
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
        if self.base is not None:
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
class LineChart(Chart):
    """Lines of positive values over positions, both axes logarithmic; each line ends with its name."""

    series: Sequence[Series]
    x_name: str
    y_name: str

    @property
    def size(self) -> tuple[float, float]:
        return 640, 260

    @property
    def margins(self) -> Margins:
        return Margins(54, 150, 34, 44)

    def draw(self, axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for series in self.series:
            axes.plot([x for x, _, _ in series.points], [y for _, y, _ in series.points], color=series.color)
            for x, y, name in series.points:
                gid = f"{TITLE}{series.name}, {name}: {y:g}"
                axes.plot([x], [y], "o", markersize=5, color=series.color, gid=gid)
            x, y, _ = series.points[-1]
            place = (x, y), (10, 0), "data", "offset points"
            axes.annotate(series.name, *place, va="center", color=series.color, weight="bold", size=11)
        axes.minorticks_off()
        axes.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1024"])
        axes.set_yticks(list(TICKS), [f"{tick:g}" for tick in TICKS])
        values = [y for series in self.series for _, y, _ in series.points]
        axes.set_ylim(0.8 * min(values), 1.25 * max(values))
        axes.grid(axis="y", color=RULE, linewidth=1)
        name_axes(axes, self.x_name, self.y_name)


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


def divergence_chart() -> SizeChart:
    """Return size of the checkpoint against KL divergence of all chains that were measured with both."""
    tables = [part for part in measured().tables if part.name != "cache"]  # a cache is not in the checkpoint
    rows = [(row, part.name) for part in tables for row in part.rows if row.mb and row.kl]
    best = list(frontier([row for row, _ in rows], lambda row: (row.mb or math.nan, divergence_of(row))))
    kinds = {
        "best at its size": [row for row, _ in rows if row in best],
        "other quantized": [row for row, kind in rows if kind in QUANTIZED and row not in best],
        "zeros and smaller shapes": [row for row, kind in rows if kind not in QUANTIZED and row not in best],
    }
    colors = MAIN, QUIET, BAD
    series = [
        Series(name, [(row.mb or math.nan, divergence_of(row), label(row)) for row in chosen], color, color == MAIN)
        for (name, chosen), color in zip(kinds.items(), colors, strict=True)
    ]
    title = "Chains of passes, SmolLM2-135M-Instruct (269 MB in 16 bits) on WikiText-2"
    return SizeChart(title, series, None, "MB of the checkpoint", "KL divergence", TICKS)


def divergence_of(row: Row) -> float:
    """Return the KL divergence of a row."""
    return math.nan if row.kl is None else row.kl[0]


def position_chart() -> LineChart:
    """Return the KL divergence by the position in a window, of the rows of `POSITIONS`."""
    rows = {row.name: row for part in measured().tables for row in part.rows}
    lines = [
        Series(
            name,
            [((first * last) ** 0.5, kl, f"{first} to {last}") for first, last, kl in rows[row].by_position],
            color,
        )
        for (row, name), color in zip(POSITIONS.items(), (MAIN, TEXT, QUIET, BAD), strict=True)
    ]
    title = "KL divergence by position in the window, SmolLM2-135M-Instruct on WikiText-2"
    return LineChart(title, lines, "position of the predicted token", "KL divergence")


def methods_chart() -> SizeChart:
    """Return bits per weight against perplexity of all measured chains that quantize."""
    rows = [row for part in measured().tables if part.name in QUANTIZED for row in part.rows]
    rows = [row for row in rows if row.bits is not None and row.perplexity < WORST]
    best = list(frontier(rows, lambda row: (row.bits or math.nan, row.perplexity)))
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


def frontier(rows: Sequence[Row], coordinates: Callable[[Row], tuple[float, float]]) -> Iterator[Row]:
    """Yield, from the largest to the smallest, the rows (size, loss) that no smaller row equals."""
    best = math.inf
    for row in sorted(rows, key=coordinates):
        loss = coordinates(row)[1]
        if loss < best:
            best = loss
            yield row


def speed_chart() -> SizeChart:
    """Return size of the checkpoint against tokens per second of decoding, by program."""
    points: dict[str, list[tuple[float, float, str]]] = {name: [] for name in PROGRAMS}
    for row in table("Speed on a CPU"):
        program, weights, *inputs = row["program"].split(", ")
        name = weights if weights.startswith("int") else ""
        points[", ".join([program, *inputs])].append((number_of(row["MB"]), number_of(row["decoding"]), name))
    series = [Series(name, points[name], color) for name, color in PROGRAMS.items()]
    title = "Decoding SmolLM2-135M on two CPU threads"
    return SizeChart(title, series, None, "MB of the checkpoint", "tokens per second", (20, 50, 100, 200, 400))


def figures() -> dict[Path, str]:
    """Return the text of every figure."""
    charts = {"llamacpp": llamacpp_chart(), "methods": methods_chart(), "speed": speed_chart()}
    charts |= {"divergence": divergence_chart(), "positions": position_chart()}
    return {IMAGES / f"{name}.svg": picture([chart]).text for name, chart in charts.items()}
