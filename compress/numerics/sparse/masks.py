"""Masks: True for the weights that remain; a pattern chooses them from scores."""

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
"""The patterns, for error messages."""


@dataclass(frozen=True)
class Pattern:
    """Pattern of zeros.

    'row': a fraction of each row. 'layer': anywhere in the matrix. 'N:M': N of each M consecutive columns remain.
    'RxC': blocks of R rows and C columns, anywhere in the matrix.
    """

    text: str = "row"

    def __post_init__(self) -> None:
        if self.text == "global":
            raise ValueError(
                "pattern global is not known; for one threshold over all layers use allocate: global, pattern: layer"
            )
        if self.text not in ("row", "layer") and self.n_of_m is None and self.block is None:
            raise ValueError(f"pattern {self.text!r} is not known; use {WAYS}")
        if self.n_of_m is not None and not 0 < self.n_of_m[0] < self.n_of_m[1]:
            n, m = self.n_of_m
            raise ValueError(f"pattern {self.text!r} keeps {n} of {m}; N must be at least 1 and smaller than M")
        if self.block is not None and (min(self.block) < 1 or self.block == (1, 1)):
            raise ValueError(
                f"pattern {self.text!r}: a block needs at least one row and one column; write layer instead of 1x1"
            )

    @property
    def n_of_m(self) -> tuple[int, int] | None:
        """(N, M) for an N:M pattern, None otherwise."""
        return self._numbers(":")

    @property
    def block(self) -> tuple[int, int] | None:
        """(rows, columns) of a block pattern, None otherwise."""
        return self._numbers("x")

    def _numbers(self, between: str) -> tuple[int, int] | None:
        match = re.fullmatch(rf"(\d+){between}(\d+)", self.text)
        return (int(match[1]), int(match[2])) if match else None

    @property
    def span(self) -> int:
        """The number of columns that are decided together: M, C, or 1."""
        if self.n_of_m is not None:
            return self.n_of_m[1]
        return self.block[1] if self.block is not None else 1

    def whole(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the (rows, columns) that complete units of the pattern cover; the remainder stays dense."""
        rows, width = shape
        high = self.block[0] if self.block is not None else 1
        return rows // high * high, width // self.span * self.span

    def keep(self, score: Float[Tensor, "out in"], density: float) -> Bool[Tensor, "out in"]:
        """Return the mask of the highest scores, exactly round(density * n) of each unit.

        An N:M pattern has its own density N/M. The score of a block is the mean score of its weights. Rows and columns
        after the last complete unit stay dense. Ties go to the lower column; with N:M, in every other row to the higher
        one. In a model with quantized weights a sixth of the groups has ties, and the same choice in all rows would
        correlate the errors.
        """
        if self.text == "row":
            return top(score, round(density * score.shape[1]))
        rows, width = self.whole((score.shape[0], score.shape[1]))
        if (rows, width) != score.shape:
            mask = torch.ones_like(score, dtype=torch.bool)
            mask[:rows, :width] = self.keep(score[:rows, :width], density) if rows and width else True
            return mask
        if self.n_of_m is not None:
            n, m = self.n_of_m
            return _top_of_groups(score.reshape(rows, -1, m), n).reshape(score.shape)
        units = self.units(score)
        mask = top(units[None], round(density * units.numel()))
        if self.block is None:
            return mask.reshape(score.shape)
        high, wide = self.block
        return mask.reshape(rows // high, width // wide).repeat_interleave(high, 0).repeat_interleave(wide, 1)

    def units(self, score: Float[Tensor, "out in"]) -> Float[Tensor, " units"]:
        """Return the scores of the units that are kept or removed together: blocks, or single weights; row by row.

        A score below zero marks a weight that is already removed. Such a weight adds nothing to the score of its block;
        a block of only such weights is below all others.
        """
        if self.block is None:
            return score.reshape(-1)
        (high, wide), (rows, width) = self.block, self.whole((score.shape[0], score.shape[1]))
        blocks = score[:rows, :width].reshape(rows // high, high, width // wide, wide)
        return (blocks.clamp(min=0).mean((1, 3)) - (blocks.amax((1, 3)) < 0).to(score.dtype)).reshape(-1)

    def removed(self, shape: tuple[int, int], density: float) -> int:
        """Return the number of weights that `keep` removes from a matrix of this shape."""
        rows, width = self.whole(shape)
        if self.n_of_m is not None:
            n, m = self.n_of_m
            return rows * width // m * (m - n)
        if self.text == "row":
            return rows * (width - round(density * width))
        size = self.block[0] * self.block[1] if self.block is not None else 1
        return (rows * width // size - round(density * (rows * width // size))) * size

    def refuses(self, shape: tuple[int, int], density: float) -> str | None:
        """Return why the pattern would remove nothing from a matrix of this shape; None if it removes something."""
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
        """Read a pattern from a string of a recipe."""
        parse = core_schema.no_info_plain_validator_function(lambda v: v if isinstance(v, cls) else cls(_text(v)))
        return core_schema.json_or_python_schema(
            json_schema=parse,
            python_schema=parse,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda p: p.text),
        )


def _text(value: Any) -> str:
    """Return the text of a pattern; YAML 1.1 reads an unquoted 2:4 as the base-60 number 124."""
    if isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(f'pattern {value} is a number; quote N:M in YAML: "{value // 60}:{value % 60}"')
    if not isinstance(value, str):
        raise ValueError(f"pattern {value!r} is not a string; use {WAYS}")
    return value


MOST_PAIRS = 128
"""The pairs of columns of a group up to which comparing all of them is faster than a search in each group."""


def _top_of_groups(score: Float[Tensor, "rows groups m"], count: int) -> Bool[Tensor, "rows groups m"]:
    """Return True for the `count` highest scores of each group; ties as in `Pattern.keep`."""
    size = score.shape[2]
    if size * (size - 1) // 2 > MOST_PAIRS:
        is_odd_row = (torch.arange(len(score), device=score.device) % 2 == 1).repeat_interleave(score.shape[1])
        return top(score.reshape(-1, size), count, is_odd_row).reshape(score.shape)
    mask = torch.empty(score.shape, dtype=torch.bool, device=score.device)
    for parity, earlier_wins in ((0, torch.ge), (1, torch.gt)):
        columns = [column.contiguous() for column in score[parity::2].unbind(-1)]
        higher_counts = [torch.zeros_like(column, dtype=torch.uint8) for column in columns]
        for later in range(size):
            for earlier in range(later):
                is_earlier = earlier_wins(columns[earlier], columns[later])
                higher_counts[later] += is_earlier
                higher_counts[earlier] += ~is_earlier
        mask[parity::2] = torch.stack([higher < count for higher in higher_counts], dim=-1)
    return mask


def top(
    score: Float[Tensor, "rows n"], count: int, prefer_last: Bool[Tensor, " rows"] | None = None
) -> Bool[Tensor, "rows n"]:
    """Return True for the `count` highest scores of each row.

    Args:
        score: the scores.
        count: number of scores per row.
        prefer_last: rows in which ties go to the higher index; None: ties go to the lower index in all rows.
    """
    size = score.shape[1]
    if count in (0, size):
        return torch.full_like(score, count > 0, dtype=torch.bool)
    cut = score.kthvalue(size - count + 1, dim=1, keepdim=True).values
    is_above, is_equal = score > cut, score == cut
    room, ties = count - is_above.sum(1, keepdim=True), is_equal.sum(1, keepdim=True)
    if bool((ties > room).any()):
        rank = is_equal.cumsum(1)
        if prefer_last is not None:
            rank = torch.where(prefer_last[:, None], ties + 1 - rank, rank)
        is_equal &= rank <= room
    return is_above | is_equal
