"""Measured rows as data: the tables of docs/results-all.md, and the rows that the page of each pass shows.

The file `measured.yaml` holds the figures; this module imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

HEAD = ("row", "passes", "perplexity", "KL divergence", "seconds", "peak MB", "bits per weight", "MB")


@dataclass(frozen=True)
class Row:
    """One measured chain of passes.

    Attributes:
        passes: as a recipe spells them.
        kl: KL divergence from the uncompressed model in nats per token, and its standard error; None if not measured.
        seconds: duration of the run; None if not measured.
        peak_mb: peak memory in MB; None if not measured.
        bits: bits per weight; None if not measured.
        mb: size of the checkpoint's files of weights in MB, embedding and head included; None if not measured.
        by_position: (first position, last position, KL divergence) of each part of a window; empty if not measured.
    """

    name: str
    passes: tuple[Mapping[str, Any], ...]
    perplexity: float
    note: str = ""
    kl: tuple[float, float] | None = None
    seconds: int | None = None
    peak_mb: int | None = None
    bits: float | None = None
    mb: float | None = None
    by_position: tuple[tuple[int, int, float], ...] = ()

    def has(self, key: str) -> bool:
        """Return whether the chain contains a pass, by its key."""
        return any(key in step for step in self.passes)

    @property
    def divergence(self) -> str:
        """The KL divergence and its standard error; empty if not measured."""
        return "" if self.kl is None else f"{self.kl[0]:.3f} ± {self.kl[1]:.3f}"

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table row with the columns of `HEAD`."""
        label = f"`{self.name}`" + (f", {self.note}" if self.note else "")
        chain = ", ".join(f"`{spelled(step)}`" for step in self.passes)
        figures = ("" if value is None else f"{value:g}" for value in (self.seconds, self.peak_mb, self.bits, self.mb))
        return label, chain, figure(self.perplexity), self.divergence, *figures


@dataclass(frozen=True)
class Table:
    """Rows that were measured in the same way.

    Attributes:
        text: what the rows have in common.
    """

    name: str
    text: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Measured:
    """All tables of measured rows.

    Attributes:
        protocol: model, text and calibration.
        uncompressed: perplexity of the uncompressed model on that text.
    """

    protocol: str
    uncompressed: float
    tables: tuple[Table, ...]


@cache
def measured() -> Measured:
    """Read the tables of `measured.yaml`."""
    values = yaml.safe_load(files("compress.recipe").joinpath("measured.yaml").read_text(encoding="utf-8"))
    tables = (
        Table(name, table["text"], tuple(_row(row) for row in table["rows"]))
        for name, table in values["tables"].items()
    )
    return Measured(values["protocol"], values["uncompressed"], tuple(tables))


def _row(values: dict[str, Any]) -> Row:
    lists = {key: tuple(values[key]) for key in ("passes", "kl") if key in values}
    return Row(**{**values, **lists, "by_position": tuple(tuple(part) for part in values.get("by_position", ()))})


def rows_of(key: str) -> list[tuple[Table, list[Row]]]:
    """Return the tables that contain chains with a pass, each with these rows."""
    return [(table, rows) for table in measured().tables if (rows := [row for row in table.rows if row.has(key)])]


def figure(perplexity: float) -> str:
    """Format a perplexity with two decimals, or with one from 100 on."""
    return f"{perplexity:.2f}" if perplexity < 100 else f"{perplexity:.1f}".removesuffix(".0")


def spelled(step: Mapping[str, Any]) -> str:
    """Format a pass as one line of YAML: gptq: {weights: int4}."""
    [(key, options)] = step.items()
    text = yaml.safe_dump(options, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return f"{key}: {text}" if options else key
