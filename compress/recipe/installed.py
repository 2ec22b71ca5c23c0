"""The passes of installed packages, by the entry points that their pyproject.toml declares. Imports nothing slow."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "compress.passes"
"""The entry point group of installed passes."""


@cache
def installed() -> dict[str, list[EntryPoint]]:
    """Return the entry points of installed packages by name, without loading them."""
    points_by_name: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        points_by_name.setdefault(point.name, []).append(point)
    return points_by_name
