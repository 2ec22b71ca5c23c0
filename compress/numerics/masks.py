"""Masks: which weights are kept, chosen from scores by a pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema
from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """Where zeros may stand: 'row' (each row alone), 'layer' (anywhere in the matrix), or 'N:M' (N kept of each M)."""

    text: str = "row"

    def __post_init__(self) -> None:
        if self.text not in ("row", "layer") and self.n_of_m is None:
            raise ValueError(f"pattern {self.text!r} is not known; write row, layer, or N:M such as 2:4")
        if self.n_of_m is not None and not 0 < self.n_of_m[0] < self.n_of_m[1]:
            n, m = self.n_of_m
            raise ValueError(f"pattern {self.text!r} keeps {n} of {m}; N must be at least 1 and smaller than M")

    @property
    def n_of_m(self) -> tuple[int, int] | None:
        """(kept, out of) for an N:M pattern, None otherwise."""
        found = re.fullmatch(r"(\d+):(\d+)", self.text)
        return (int(found[1]), int(found[2])) if found else None

    def keep(self, score: Float[Tensor, "out in"], density: float) -> Bool[Tensor, "out in"]:
        """True for the weights to keep: those of the highest score; exactly round(density * n) of each unit.

        An N:M pattern has its own density N/M; columns after the last whole group of M stay dense. Ties go to the
        lower column.
        """
        if self.n_of_m is not None:
            return self._keep_n_of_m(score, *self.n_of_m)
        rows = score if self.text == "row" else score.reshape(1, -1)
        return _top(rows, round(density * rows.shape[1])).reshape(score.shape)

    def _keep_n_of_m(self, score: Tensor, n: int, m: int) -> Tensor:
        whole = score.shape[1] // m * m
        kept = torch.ones_like(score, dtype=torch.bool)
        kept[:, :whole] = _top(score[:, :whole].reshape(-1, m), n).reshape(score.shape[0], whole)
        return kept

    def violations(self, weight: Float[Tensor, "out in"]) -> int:
        """How many groups of an N:M pattern hold more than N non-zeros (0 for the other patterns)."""
        if self.n_of_m is None:
            return 0
        n, m = self.n_of_m
        whole = weight.shape[1] // m * m
        return int(((weight[:, :whole] != 0).reshape(-1, m).sum(1) > n).sum())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """A recipe spells a pattern as a string."""
        parse = core_schema.no_info_plain_validator_function(lambda v: v if isinstance(v, cls) else cls(_text(v)))
        return core_schema.json_or_python_schema(
            json_schema=parse,
            python_schema=parse,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda p: p.text),
        )


def _text(value: Any) -> str:
    """The text of a pattern; YAML 1.1 reads an unquoted 2:4 as the base-60 number 124."""
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(f'pattern {value} is a number; N:M needs quotes in YAML: "{value // 60}:{value % 60}"')
    if not isinstance(value, str):
        raise ValueError(f"pattern {value!r} is not text; write row, layer, or N:M such as 2:4")
    return value


def _top(score: Tensor, count: int) -> Tensor:
    """True for the `count` highest of each row, ties to the lower index."""
    order = score.argsort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(score, dtype=torch.bool)
    return kept.scatter_(1, order[:, :count], True)
