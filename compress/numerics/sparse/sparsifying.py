"""Pruning inside the column sweep: SparseGPT's choice of zeros, alone or combined with rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.numerics.column_sweep import sweep
from compress.numerics.quant.rounding import Rounding
from compress.numerics.sparse.masks import Pattern


class Sparsifying:
    """Column rule of SparseGPT (Frantar 2023, algorithm 1): zeros are chosen when the sweep reaches their columns.

    It removes the weights with the least w^2 / U_jj^2, the increase of the error: with a row or layer pattern, the
    fraction 1 - density of each `block` of columns; with an N:M pattern, M - N of each M. `inner` rounds the remaining
    weights of each column.

    Args:
        pattern: pattern of zeros.
        density: fraction of the weights that remain.
        block: columns whose zeros are chosen together.
        pivots: U_jj, in the order of the columns; infinite for columns without cost.
        rows: number of rows of the weight.
        mask: True for weights that may remain, in this order.
        rounding: creates the inner rule from the mask [out, in], which is updated in place as zeros are chosen.
    """

    def __init__(
        self,
        pattern: Pattern,
        density: float,
        block: int,
        pivots: Float[Tensor, " in"],
        rows: int,
        mask: Bool[Tensor, "out in"] | None = None,
        rounding: Callable[[Bool[Tensor, "out in"]], Rounding] | None = None,
    ) -> None:
        self.pattern, self.density, self.pivots = pattern, density, pivots
        self.block = None if pattern.n_of_m is not None else block
        self._allowed = None if mask is None else mask.T
        self._keep = torch.ones(len(pivots), rows, dtype=torch.bool, device=pivots.device)  # a column is contiguous
        self._decided = 0  # the number of columns whose zeros are chosen
        self.inner = None if rounding is None else rounding(self._keep.T)  # a view: it sees later writes to _keep

    def __call__(self, weight: Float[Tensor, "out in"], factor: Float[Tensor, "in in"]) -> Float[Tensor, "out in"]:
        """Return the weight after the sweep."""
        lookahead = None if self.block is not None else self._lookahead
        return sweep(weight, factor, self, lookahead, self.pattern.span).contiguous()

    def kept(self, order: Int[Tensor, " in"] | None) -> Bool[Tensor, "out in"]:
        """Return the mask, in the original order of the columns."""
        return (self._keep if order is None else self._keep[order.argsort()]).T.contiguous()

    def choose(self, column: int, values: Float[Tensor, "columns out"]) -> None:
        """Choose the zeros of the columns from `column` on."""
        columns = slice(column, column + values.shape[0])
        score = (values / self.pivots[columns, None]).square_()
        if not bool(score.any()):
            score = values.square()  # inputs that are always zero: score by magnitude
        if self._allowed is not None:
            score = score.masked_fill_(~self._allowed[columns], -1)
        mask = self.pattern.keep(score.T, self.density).T
        self._keep[columns] = mask if self._allowed is None else mask & self._allowed[columns]

    def starts(self, width: int) -> Sequence[int]:
        blocks = [0] if self.block is None else range(0, width, self.block)
        return sorted({*blocks, *(() if self.inner is None else self.inner.starts(width))})

    def open(self, column: int, remaining: Float[Tensor, "rest out"]) -> None:
        if self.block is not None and column % self.block == 0:
            self.choose(column, remaining[: self.block])
            self._decided = column + self.block
        inner = self.inner
        if inner is None or column not in inner.starts(column + remaining.shape[0]):
            return
        size = inner.options.group_size
        if isinstance(size, int):
            # The group's scale must fit the kept weights: predict the zeros that are not chosen yet
            next_undecided = max(self._decided, column)
            self.choose(next_undecided, remaining[next_undecided - column : size])
        inner.open(column, remaining)

    def _lookahead(self, column: int, near: Float[Tensor, "span out"]) -> None:
        self.choose(column, near)

    def compress(self, column: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        if self.inner is not None:
            return self.inner.compress(column, values)
        return values.masked_fill(~self._keep[column], 0)


def order_by(diagonal: Float[Tensor, " in"], span: int) -> Int[Tensor, " in"]:
    """Order columns by descending input energy, in units of `span` adjacent columns; an incomplete unit stays last."""
    full_width = len(diagonal) // span * span
    units = diagonal[:full_width].view(-1, span).sum(1).argsort(descending=True, stable=True)
    complete_units = (units[:, None] * span + torch.arange(span, device=diagonal.device)).view(-1)
    return torch.cat([complete_units, torch.arange(full_width, len(diagonal), device=diagonal.device)])
