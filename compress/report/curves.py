"""Curves of recorded values over steps: as lines of text for report.md, and as one picture, training.svg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import isfinite

FILE = "training.svg"

Curve = Sequence[Mapping[str, float]]
"""Points in order: 'step', and the values recorded there, by name."""

Series = list[tuple[float, float]]
"""(step, value), in order."""

HEIGHTS = "▁▂▃▄▅▆▇█"
LONGEST = 48  # characters of a line of text; points that share a character are averaged
NAMES = {"loss": "loss", "held_out": "held out", "sparsity": "sparsity", "flips": "mask flips"}
PANEL, PLOT, LEFT, TOP = (360, 190), (280, 120), 60, 36  # pixels: of a panel with its texts, of the curve, its corner
COLORS = ("#1f77b4", "#d62728")


def series(curve: Curve) -> dict[str, Series]:
    """The finite values of a curve by display name; the learning rate is left out, since the recipe states it."""
    found: dict[str, Series] = {}
    for point in curve:
        for key, value in point.items():
            if key not in ("step", "rate") and isfinite(value):
                found.setdefault(NAMES.get(key, key), []).append((point["step"], value))
    return found


def spark(values: Sequence[float]) -> str:
    """Values as a line of text: the height of each character is the mean of its points, scaled to the range."""
    count = min(len(values), LONGEST)
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    top = len(HEIGHTS) - 1
    return "".join(HEIGHTS[round((m - low) / (high - low) * top) if high > low else 0] for m in means)


def sparks(curves: Mapping[str, Curve]) -> str:
    """Curves by label as text; a line for each value: name, first value, curve, last value."""
    lines = []
    for label, curve in curves.items():
        lines.append(label)
        for name, points in series(curve).items():
            values = [value for _, value in points]
            lines.append(f"  {name:<10} {values[0]:>9.4g} {spark(values)} {values[-1]:.4g}")
    return "\n".join(lines)


def picture(curves: Mapping[str, Curve]) -> str:
    """Curves by label as an SVG: a row for each, with losses in the first panel and every share in its own panel."""
    rows = []
    for label, curve in curves.items():
        found = series(curve)
        losses = {name: found.pop(name) for name in ("loss", "held out") if name in found}
        rows.append((label, [losses, *({name: points} for name, points in found.items())]))
    width = PANEL[0] * max(len(panels) for _, panels in rows)
    height = PANEL[1] * len(rows)
    parts = [
        _panel(label if column == 0 else "", lines, PANEL[0] * column, PANEL[1] * row)
        for row, (label, panels) in enumerate(rows)
        for column, lines in enumerate(panels)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
    return f'{head} font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'


def _panel(label: str, lines: Mapping[str, Series], x: int, y: int) -> str:
    """One panel: curves over steps; the axes are labelled with the largest and the least value and the last step."""
    points = [point for line in lines.values() for point in line]
    last = max((step for step, _ in points), default=1) or 1
    low, high = min((v for _, v in points), default=0.0), max((v for _, v in points), default=1.0)
    span = high - low or 1.0
    wide, tall = PLOT
    texts = [(LEFT, 14, label, "#000")]
    texts += [(LEFT + 90 * i, TOP - 6, name, COLORS[i]) for i, name in enumerate(lines)]
    texts += [(4, TOP + 10, f"{high:.4g}", "#555"), (4, TOP + tall, f"{low:.4g}", "#555")]
    texts += [(LEFT + wide - 60, TOP + tall + 16, f"step {last:g}", "#555")]
    drawn = [f'<text x="{a}" y="{b}" fill="{color}">{escape(text)}</text>' for a, b, text, color in texts]
    for color, line in zip(COLORS, lines.values(), strict=False):
        at = " ".join(f"{LEFT + wide * s / last:.1f},{TOP + tall * (high - v) / span:.1f}" for s, v in line)
        drawn.append(f'<polyline points="{at}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    frame = f'<rect x="{LEFT}" y="{TOP}" width="{wide}" height="{tall}" fill="none" stroke="#bbb"/>'
    return f'<g transform="translate({x},{y})">{frame}{"".join(drawn)}</g>'
