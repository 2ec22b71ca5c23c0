"""Measured rows as data: the tables of docs/measured.md, and the rows that the page of each pass shows.

The file `measured.yaml` holds the figures; this module imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

HEAD = ("row", "passes", "perplexity", "seconds", "peak MB", "bits per weight")


@dataclass(frozen=True)
class Row:
    """One measured chain of passes.

    passes: as a recipe spells them. seconds, peak_mb, bits (per weight): None where they were not measured.
    """

    name: str
    passes: tuple[Mapping[str, Any], ...]
    perplexity: float
    note: str = ""
    seconds: int | None = None
    peak_mb: int | None = None
    bits: float | None = None

    def has(self, key: str) -> bool:
        """Whether the chain contains a pass, by its key."""
        return any(key in step for step in self.passes)

    def cells(self) -> tuple[str, ...]:
        """The row of a table with `HEAD`."""
        label = f"`{self.name}`" + (f", {self.note}" if self.note else "")
        chain = ", ".join(f"`{spelled(step)}`" for step in self.passes)
        figures = (self.seconds, self.peak_mb, self.bits)
        return label, chain, figure(self.perplexity), *("" if value is None else f"{value:g}" for value in figures)


@dataclass(frozen=True)
class Table:
    """Rows that were measured alike. text: what they have in common."""

    name: str
    text: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Measured:
    """All tables. protocol: model, text and calibration. uncompressed: the model's perplexity on that text."""

    protocol: str
    uncompressed: float
    tables: tuple[Table, ...]


@cache
def measured() -> Measured:
    """The tables of `measured.yaml`."""
    values = yaml.safe_load(files("compress.recipe").joinpath("measured.yaml").read_text(encoding="utf-8"))
    tables = (
        Table(name, table["text"], tuple(Row(**{**row, "passes": tuple(row["passes"])}) for row in table["rows"]))
        for name, table in values["tables"].items()
    )
    return Measured(values["protocol"], values["uncompressed"], tuple(tables))


def rows_of(key: str) -> list[tuple[Table, list[Row]]]:
    """The tables that contain chains with a pass, each with these rows."""
    found = [(table, [row for row in table.rows if row.has(key)]) for table in measured().tables]
    return [(table, rows) for table, rows in found if rows]


def figure(perplexity: float) -> str:
    """A perplexity with two decimals, from 100 on with four digits or as a whole number."""
    return f"{perplexity:.2f}" if perplexity < 100 else f"{perplexity:.1f}".removesuffix(".0")


def spelled(step: Mapping[str, Any]) -> str:
    """A pass in one line of YAML: gptq: {weights: int4}."""
    [(key, options)] = step.items()
    text = yaml.safe_dump(options, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return f"{key}: {text}" if options else key
