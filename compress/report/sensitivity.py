"""Sensitivities drawn: heat maps for a page, a page of its own, and a picture for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from compress.recipe.sensitivities import Sensitivities, Sensitivity
from compress.report.depth import heat_map
from compress.report.names import short_name
from compress.report.page.blocks import Block, Heading, Prose, Table
from compress.report.page.charts import Heat
from compress.report.page.numbers import number, with_error
from compress.report.page.render import Part, page

SHOWN = 20  # rows of the table; the JSON file has all
NAMES, CELL, TALL, HEAD = 150, 18, 18, 26  # pixels of the picture: names on the left, cells, and the line above a map
COLORS = "#e6f0f8", "#c6dcee", "#9fc5e2", "#74abd4", "#4a8fc4", "#2873b0", "#0d528f"
"""The seven levels of a heat map; dark is sensitive. Readable on white and on black."""


def maps(found: Sensitivities) -> list[Block]:
    """What was measured, and a heat map for each choice."""
    text = (
        f"KL divergence from the model when one {found.level} alone is changed, in nats per token, on {found.windows} "
        f"windows of {found.length} tokens of {found.text}. Colors follow the logarithm. Layers interact: this says "
        "where to spend bits, not what the result will be."
    )
    blocks: list[Block] = [Prose(text)]
    for choice, heat in _heats(found):
        total = sum(one.kl for one in found.found if one.choice == choice)
        blocks += [Heading(choice, f"{number(total)} nats over all {found.level}s"), *([] if heat is None else [heat])]
    return blocks


def most_sensitive(found: Sensitivities, shown: int = SHOWN) -> Table:
    """The layers with the largest divergences."""
    worst = sorted(found.found, key=lambda one: -one.kl)[:shown]
    return Table((found.level, "choice", "bits", "KL", "loss"), [_row(one) for one in worst], frozenset({1}))


def html(found: Sensitivities) -> str:
    """A page with the heat maps and the most sensitive layers."""
    title = f"The most sensitive {found.level}s"
    parts = [Part("maps", "", maps(found)), Part("worst", title, [most_sensitive(found)])]
    return page(f"Sensitivity of {short_name(found.model)}", "compress sensitivity", parts)


class Picture:
    """An SVG image; a notebook shows it. text: the SVG."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_svg_(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text


def picture(found: Sensitivities) -> Picture:
    """The heat maps of all choices as one SVG: kinds of layers by block, with the value of each cell as its title."""
    drawn = [(choice, heat) for choice, heat in _heats(found) if heat is not None]
    wide = NAMES + CELL * max((len(heat.columns) for _, heat in drawn), default=0) + 10
    parts: list[str] = []
    top = 0
    for choice, heat in drawn:
        low, high = map(number, heat.limits)
        title = f"{choice}: KL in nats per token, {low} (light) to {high} (dark)"
        parts.append(f'<text x="4" y="{top + 17}" font-weight="bold">{escape(title)}</text>')
        top += HEAD
        for row, name in enumerate(heat.rows):
            parts += _cells(heat, row, name, top + row * TALL)
        top += TALL * len(heat.rows) + 16
        ends = f"{heat.unit} {heat.columns[0]} to {heat.columns[-1]}"
        parts.append(f'<text x="{NAMES}" y="{top - 2}">{escape(ends)}</text>')
        top += 12
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{top}" viewBox="0 0 {wide} {top}" {style}>'
    return Picture("\n".join([frame, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]))


def _cells(heat: Heat, row: int, name: str, y: int) -> list[str]:
    found = [f'<text x="{NAMES - 6}" y="{y + 13}" text-anchor="end">{escape(name)}</text>']
    for column, value in enumerate(heat.values[row]):
        if value is not None:
            place = f'x="{NAMES + CELL * column}" y="{y}" width="{CELL - 1}" height="{TALL - 1}"'
            text = escape(f"{name}, {heat.unit} {heat.columns[column]}: {number(value)}")
            found.append(f'<rect {place} fill="{COLORS[heat.level(value)]}"><title>{text}</title></rect>')
    return found


def _heats(found: Sensitivities) -> Sequence[tuple[str, Heat | None]]:
    return [
        (choice, heat_map(((one.name, one.kl) for one in found.found if one.choice == choice), log=True))
        for choice in found.choices
    ]


def _row(one: Sensitivity) -> tuple[str, ...]:
    errors = with_error(one.kl, one.kl_stderr), with_error(one.loss, one.loss_stderr, "+")
    return (one.name, one.choice, number(one.bits), *errors)
