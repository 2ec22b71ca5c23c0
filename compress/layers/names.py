"""Names of modules."""

from __future__ import annotations

import re


def kind_of(name: str) -> str:
    """Return the kind of a module of several blocks: its name with '*' for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
