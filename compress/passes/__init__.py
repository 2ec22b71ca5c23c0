"""The passes, one file per algorithm; the file's name is the key in a recipe. Nothing is registered by hand."""

from __future__ import annotations

from compress.api.discovery import classes_by_file
from compress.api.passes import Pass

PASSES: dict[str, type[Pass]] = classes_by_file(__name__, __path__, Pass)
"""The class of every pass by its key."""
