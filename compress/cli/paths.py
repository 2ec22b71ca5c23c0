"""Paths on the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


class UserPath(click.Path):
    """A path, with `~` for the home folder: shells do not replace it inside of quotes and after `--out=`."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path with the home folder."""
        return super().convert(os.path.expanduser(value), param, ctx)
