"""Render a page: one HTML file without scripts, and without anything that is loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from compress.report.charts import STYLE
from compress.report.page.blocks import PageBlock
from compress.report.page.numbers import PLUS_MINUS
from compress.version import __version__

NAME_PARTS = re.compile(r"(?<=[./_])(?=[^\W\d])")
PACKAGE = "compress.report.page"


@dataclass(frozen=True)
class PageSection:
    """A section of a page.

    Attributes:
        key: Its anchor.
        title: Its heading; empty for none.
        blocks: Its content.
    """

    key: str
    title: str
    blocks: Sequence[PageBlock]


def page(title: str, subtitle: str, parts: Sequence[PageSection]) -> str:
    """Render an HTML file. All strings of the arguments are text, and are escaped."""
    template = environment().get_template("page.html")
    facts = {"title": title, "subtitle": subtitle, "parts": parts, "version": __version__}
    return template.render(facts, chart_style=STYLE) + "\n"


@cache
def environment() -> Environment:
    """Return the templates, which escape all values; `draw(block)` renders a block."""
    templates = Environment(
        loader=PackageLoader(PACKAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.globals["draw"] = draw
    templates.filters |= {"soft": soft, "joined": joined}
    return templates


def joined(text: str) -> str:
    """Prevent line breaks between a value and its error."""
    return text.replace(" ± ", PLUS_MINUS)


def soft(text: str) -> Markup:
    """Escape text, and allow line breaks after the dots, slashes and underscores of a name."""
    return Markup("<wbr>").join(escape(part) for part in NAME_PARTS.split(text))


def draw(block: PageBlock) -> Markup:
    """Render one block as HTML."""
    return Markup(environment().get_template(block.template).render(block=block))
