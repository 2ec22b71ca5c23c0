"""Which programs were run on checkpoints of a format, and which misread them (`readers.yaml`)."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from compress.layers.scheme import LayerScheme


@cache
def table() -> dict[str, Any]:
    """Return the content of `readers.yaml`."""
    return yaml.safe_load(files("compress.checkpoint.formats").joinpath("readers.yaml").read_text(encoding="utf-8"))


def programs_run(format_name: str, schemes: Collection[LayerScheme]) -> list[str]:
    """Return the programs that read all grids of these layers in conformance, and that are not known to misread them.

    Args:
        schemes: of the compressed layers; none: no program was run on codes.
    """
    kinds = {_kind(scheme) for scheme in schemes if scheme.codes is not None}
    misreaders = {row["reader"] for row in _misread(format_name, schemes)}
    programs = table()["run"].get(format_name, {})
    return [name for name, read in programs.items() if kinds and kinds <= set(read) and name not in misreaders]


def _kind(scheme: LayerScheme) -> str:
    """Return the grid of the weights, and that of quantized inputs with their kind of scale."""
    assert scheme.codes is not None
    if scheme.rounding is None:
        return scheme.codes.grid.name
    static = " static" if scheme.rounding.scale == "static" else ""
    return f"{scheme.codes.grid.name}+{scheme.rounding.grid.name}{static}"


def misreadings(format_name: str, schemes: Collection[LayerScheme]) -> list[str]:
    """Return a text for each program that is known to refuse these layers, or to compute others.

    Args:
        schemes: of the compressed layers.
    """
    return [f"{row['reader']} {row['effect']}" for row in _misread(format_name, schemes)]


def _misread(format_name: str, schemes: Collection[LayerScheme]) -> list[dict[str, Any]]:
    """Return the rows of the table of programs that misread these layers."""
    codes = [scheme.codes for scheme in schemes if scheme.codes is not None]
    grids, zeros = {part.grid.name for part in codes}, any(not part.symmetric for part in codes)
    rows = [row for row in table()["misread"].get(format_name, ()) if codes]
    return [row for row in rows if grids & set(row.get("grids", grids)) and (zeros or not row.get("zero_points"))]
