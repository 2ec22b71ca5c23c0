"""Names of models, as titles show them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


MARKUP = re.compile(r"[\\`\[<|]")
"""What begins code, links, images, HTML and columns in Markdown."""


def escaped(text: str) -> str:
    """Return a text from a file, such as the name of a tensor, as Markdown that shows the text itself in one line."""
    return MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def in_code(text: str) -> str:
    """Return a text from a file as code inside of a line of Markdown."""
    return f"`{' '.join(text.replace('`', '').split())}`"


def formats_in(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the formats of a recipe of plain values, the one of the output folder first; none without `save`."""
    names = recipe["save"]["format"] if "save" in recipe else []
    return (names,) if isinstance(names, str) else tuple(names)


def short_name(source: str) -> str:
    """Return the last part of a path; a hub id as it is."""
    return source if HUB_ID.fullmatch(source) else Path(source).name or source
