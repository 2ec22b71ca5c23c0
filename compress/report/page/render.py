"""Render a page: one HTML file without scripts, and without anything that is loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from compress.report.page.blocks import Block
from compress.report.page.numbers import PLUS_MINUS
from compress.version import __version__

NAME_PARTS = re.compile(r"(?<=[./_])(?=[^\W\d])")
PACKAGE = "compress.report.page"


@dataclass(frozen=True)
class Part:
    """A section of a page. key: its anchor. title: its heading; empty: without a heading."""

    key: str
    title: str
    blocks: Sequence[Block]


def page(title: str, subtitle: str, parts: Sequence[Part]) -> str:
    """The text of an HTML file. Everything in blocks, titles and names is text and is escaped."""
    template = environment().get_template("page.html")
    return template.render(title=title, subtitle=subtitle, parts=parts, version=__version__) + "\n"


@cache
def environment() -> Environment:
    """The templates, with escaping of all values; `draw(block)` renders a block."""
    found = Environment(
        loader=PackageLoader(PACKAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.globals["draw"] = draw
    found.filters |= {"soft": soft, "joined": joined}
    return found


def joined(text: str) -> str:
    """Text that does not break between a value and its error."""
    return text.replace(" ± ", PLUS_MINUS)


def soft(text: str) -> Markup:
    """Escaped text that may break after the dots, slashes and underscores of a name."""
    return Markup("<wbr>").join(escape(part) for part in NAME_PARTS.split(text))


def draw(block: Block) -> Markup:
    """The HTML of one block."""
    return Markup(environment().get_template(block.template).render(block=block))
