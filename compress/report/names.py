"""Names of models, as titles show them."""

from __future__ import annotations

import re
from pathlib import Path

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


MARKUP = re.compile(r"[\\`\[<|]")
"""What begins code, links, images, HTML and columns in Markdown."""


def escaped(text: str) -> str:
    """Return a text from a file, such as the name of a tensor, as Markdown that shows the text itself in one line."""
    return MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def in_code(text: str) -> str:
    """Return a text from a file as code inside of a line of Markdown."""
    return f"`{' '.join(text.replace('`', '').split())}`"


def short_name(source: str) -> str:
    """Return the last part of a path; a hub id as it is."""
    return source if HUB_ID.fullmatch(source) else Path(source).name or source
