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

WAYS = "row, layer, N:M such as 2:4, or RxC such as 4x1"
"""What can be written as a pattern."""


@dataclass(frozen=True)
class Pattern:
    """Where zeros may stand.

    'row': in each row alone. 'layer': anywhere in the matrix. 'N:M': N are kept of each M columns. 'RxC': whole blocks
    of R rows and C columns, anywhere in the matrix.
    """

    text: str = "row"

    def __post_init__(self) -> None:
        if self.text == "global":
            raise ValueError("one threshold for all layers is 'allocate: global', with pattern: layer")
        if self.text not in ("row", "layer") and self.n_of_m is None and self.block is None:
            raise ValueError(f"pattern {self.text!r} is not known; write {WAYS}")
        if self.n_of_m is not None and not 0 < self.n_of_m[0] < self.n_of_m[1]:
            n, m = self.n_of_m
            raise ValueError(f"pattern {self.text!r} keeps {n} of {m}; N must be at least 1 and smaller than M")
        if self.block is not None and (min(self.block) < 1 or self.block == (1, 1)):
            raise ValueError(f"pattern {self.text!r}: blocks need at least one row and column; 1x1 is called layer")

    @property
    def n_of_m(self) -> tuple[int, int] | None:
        """(kept, out of) for an N:M pattern, None otherwise."""
        return self._numbers(":")

    @property
    def block(self) -> tuple[int, int] | None:
        """(rows, columns) of a block pattern, None otherwise."""
        return self._numbers("x")

    def _numbers(self, between: str) -> tuple[int, int] | None:
        found = re.fullmatch(rf"(\d+){between}(\d+)", self.text)
        return (int(found[1]), int(found[2])) if found else None

    @property
    def span(self) -> int:
        """Columns that are decided on together: M, C, or 1."""
        if self.n_of_m is not None:
            return self.n_of_m[1]
        return self.block[1] if self.block is not None else 1

    def whole(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) that whole units of the pattern cover; what is beyond them stays dense."""
        rows, width = shape
        high = self.block[0] if self.block is not None else 1
        return rows // high * high, width // self.span * self.span

    def keep(self, score: Float[Tensor, "out in"], density: float) -> Bool[Tensor, "out in"]:
        """True for the weights to keep: those of the highest score; exactly round(density * n) of each unit.

        An N:M pattern has its own density N/M. The score of a block is the mean of its weights'. Rows and columns after
        the last whole unit stay dense. Ties go to the lower column, with N:M in every other row to the higher one: of a
        model whose weights were rounded before, a sixth of the groups has ties, and if they fell alike in all rows,
        so would the errors.
        """
        if self.text == "row":
            return top(score, round(density * score.shape[1]))
        rows, width = self.whole((score.shape[0], score.shape[1]))
        if (rows, width) != score.shape:
            kept = torch.ones_like(score, dtype=torch.bool)
            kept[:rows, :width] = self.keep(score[:rows, :width], density) if rows and width else True
            return kept
        if self.n_of_m is not None:
            n, m = self.n_of_m
            odd = (torch.arange(rows, device=score.device) % 2 == 1).repeat_interleave(width // m)
            return top(score.reshape(-1, m), n, odd).reshape(score.shape)
        units = self.units(score)
        kept = top(units[None], round(density * units.numel()))
        if self.block is None:
            return kept.reshape(score.shape)
        high, wide = self.block
        return kept.reshape(rows // high, width // wide).repeat_interleave(high, 0).repeat_interleave(wide, 1)

    def units(self, score: Float[Tensor, "out in"]) -> Float[Tensor, " units"]:
        """The scores of what is kept or removed as one: of blocks, otherwise of weights; row by row.

        Scores below zero are those of weights that are gone: they add nothing to their block, and a block of them alone
        is below all others.
        """
        if self.block is None:
            return score.reshape(-1)
        (high, wide), (rows, width) = self.block, self.whole((score.shape[0], score.shape[1]))
        blocks = score[:rows, :width].reshape(rows // high, high, width // wide, wide)
        return (blocks.clamp(min=0).mean((1, 3)) - (blocks.amax((1, 3)) < 0).to(score.dtype)).reshape(-1)

    def removed(self, shape: tuple[int, int], density: float) -> int:
        """How many weights `keep` removes from a matrix of this shape."""
        rows, width = self.whole(shape)
        if self.n_of_m is not None:
            n, m = self.n_of_m
            return rows * width // m * (m - n)
        if self.text == "row":
            return rows * (width - round(density * width))
        size = self.block[0] * self.block[1] if self.block is not None else 1
        return (rows * width // size - round(density * (rows * width // size))) * size

    def refuses(self, shape: tuple[int, int], density: float) -> str | None:
        """Why nothing would be removed from a matrix of this shape; None where something is."""
        rows, width = shape
        if 0 in self.whole(shape):
            return f"pattern {self.text} has no whole unit in its {rows} rows of {width}; leave it out (ignore)"
        if density < 1 and self.removed(shape, density) == 0:
            return (
                f"sparsity {1 - density:g} of its {rows} rows of {width} is not one unit of pattern {self.text}; "
                "raise it, use pattern: layer, or leave the layer out (ignore)"
            )
        return None

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
        raise ValueError(f"pattern {value!r} is not text; write {WAYS}")
    return value


def top(
    score: Float[Tensor, "rows n"], count: int, last: Bool[Tensor, " rows"] | None = None
) -> Bool[Tensor, "rows n"]:
    """True for the `count` highest of each row, ties to the lower index; to the higher one in rows where `last`."""
    size = score.shape[1]
    if count in (0, size):
        return torch.full_like(score, count > 0, dtype=torch.bool)
    cut = score.kthvalue(size - count + 1, dim=1, keepdim=True).values
    above, equal = score > cut, score == cut
    room, ties = count - above.sum(1, keepdim=True), equal.sum(1, keepdim=True)
    if bool((ties > room).any()):
        place = equal.cumsum(1)
        if last is not None:
            place = torch.where(last[:, None], ties + 1 - place, place)
        equal &= place <= room
    return above | equal
