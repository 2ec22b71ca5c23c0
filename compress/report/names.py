"""Names of models, as titles show them."""

from __future__ import annotations

import re
from pathlib import Path

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def short_name(source: str) -> str:
    """Return the last part of a path; a hub id as it is."""
    return source if HUB_ID.fullmatch(source) else Path(source).name or source
