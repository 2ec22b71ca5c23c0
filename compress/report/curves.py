"""Curves of recorded values over steps: as lines of text for report.md, and as charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite

from compress.report.charts import Line, LineChart
from compress.results.result import RunResult

CURVES = "training.svg"
"""The file of the curves in a run's folder."""

Curve = Sequence[Mapping[str, float]]
"""Points in order: 'step', and the values recorded there, by name."""

Series = list[tuple[float, float]]
"""(step, value), in order."""

HEIGHTS = "▁▂▃▄▅▆▇█"
LONGEST = 48  # characters of a line of text; points that share a character are averaged
NAMES = {"loss": "loss", "held_out": "held out", "sparsity": "sparsity", "flips": "mask flips"}
UNITS = {"sparsity": "fraction of zeros", "mask flips": "fraction of weights"}


def series(curve: Curve) -> dict[str, Series]:
    """Collect the finite values of a curve by display name, without the learning rate, which the recipe states."""
    lines: dict[str, Series] = {}
    for point in curve:
        for key, value in point.items():
            if key not in ("step", "rate") and isfinite(value):
                lines.setdefault(NAMES.get(key, key), []).append((point["step"], value))
    return lines


def spark(values: Sequence[float]) -> str:
    """Draw values as a line of text: the height of each character is the mean of its points, scaled to the range."""
    count = min(len(values), LONGEST)
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    top = len(HEIGHTS) - 1
    return "".join(HEIGHTS[round((m - low) / (high - low) * top) if high > low else 0] for m in means)


def sparks(curves: Mapping[str, Curve]) -> str:
    """Draw curves by label as text; a line for each value: name, first value, curve, last value."""
    lines = []
    for label, curve in curves.items():
        lines.append(label)
        for name, points in series(curve).items():
            values = [value for _, value in points]
            lines.append(f"  {name:<10} {values[0]:>9.4g} {spark(values)} {values[-1]:.4g}")
    return "\n".join(lines)


def charts_of(label: str, curve: Curve) -> Iterator[LineChart]:
    """Draw the loss with that of held-out sequences, and a chart for every other value."""
    lines = series(curve)
    losses = [Line(name, lines.pop(name), name != "loss") for name in ("loss", "held out") if name in lines]
    if losses:
        yield LineChart(f"{label}, loss", losses, "step", "loss of the objective")
    for name, points in lines.items():
        yield LineChart(f"{label}, {name}", [Line(name, points)], "step", UNITS.get(name, name))


def training_charts(result: RunResult) -> list[LineChart]:
    """Draw the curves of all passes that trained; none if no value is finite."""
    return [chart for label, record in result.training.items() for chart in charts_of(label, record.curve)]
