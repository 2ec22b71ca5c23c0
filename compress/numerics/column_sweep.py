"""The column sweep of optimal brain surgery: compress one column and compensate its error in the later columns.

For a layer's squared output error with Hessian H = X^T X, compressing column i of W by e = w_i - q_i is compensated
optimally by  W[:, j] -= e / U_ii * U_ij  for all j > i, with inv(H) = U^T U, U upper (GPTQ, Frantar 2022, algorithm 1;
SparseGPT, Frantar 2023, algorithm 1). A `ColumnRule` decides how a column is compressed (rounding, pruning or both).

Columns are processed in parts. The update of all columns after a part is one matrix product. Inside a part, the same
is done for leaves of a few columns, so that the inner loop touches little memory and launches few operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

PART = 128  # columns per lazy update of the later columns (GPTQ, section 3.3, step 2)
LEAF = 16  # columns per lazy update inside a part; measured best of 8, 16, 32 on widths 576 and 1536
SHRINK = 0.8  # an inverse is reduced when at most this fraction of its columns remains
CHUNK = 1 << 24  # elements of the inverse Hessians of a chunk of rows in the greedy order, one inverse per row


class ColumnRule(Protocol):
    """How a method compresses columns; a column is passed as a row of the transposed weight."""

    def starts(self, width: int) -> Sequence[int]:
        """Return the columns at which `open` must be called, ascending; the first is 0."""
        ...

    def open(self, column: int, remaining: Float[Tensor, "rest out"]) -> None:
        """Begin at `column`.

        Args:
            column: index of the column.
            remaining: this column and later ones, compensated for the errors of all earlier columns.
        """
        ...

    def compress(self, column: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        """Return the compressed values of `column`."""
        ...


@runtime_checkable
class PartRule(ColumnRule, Protocol):
    """A rule that may compress several columns in one call."""

    def compress_part(
        self, column: int, values: Float[Tensor, "part out"], ratios: Float[Tensor, "part part"]
    ) -> tuple[Tensor, Tensor] | None:
        """Compress consecutive columns, which stay unmodified.

        The error of column i times ratios[i, j] is to be subtracted from the columns j after it.

        Args:
            column: index of the first column.
            values: the columns.
            ratios: U_ij / U_ii.

        Returns:
            (compressed values, errors), [part, out] each; None if the columns must be compressed one by one.
        """
        ...


Lookahead = Callable[[int, Float[Tensor, "span out"]], None]
"""lookahead(column, near): `near` contains the columns from `column` on that are decided together, compensated for all
earlier ones."""


def sweep(
    weight: Float[Tensor, "out in"],
    factor: Float[Tensor, "in in"],
    rule: ColumnRule,
    lookahead: Lookahead | None = None,
    span: int = 1,
) -> Float[Tensor, "out in"]:
    """Compress all columns in order by `rule`; `weight` is not modified.

    Args:
        weight: the weight.
        factor: U of `linalg.inverse_factor`, in the order of the columns.
        rule: decides how a column is compressed. It may open groups only at multiples of `span`.
        lookahead: called before every `span` columns (fewer at the end), in addition to the methods of the rule.
        span: columns that are decided together.

    Returns:
        The compressed weight.
    """
    work = weight.T.clone(memory_format=torch.contiguous_format)  # [in, out]: a column is contiguous
    width = work.shape[0]
    opens = set(rule.starts(width))
    for start, stop in _parts(sorted(opens), width, span):
        if start in opens:
            rule.open(start, work[start:])
        # e_i / U_ii * U_ij = e_i * (U_ij / U_ii); the second factor is the same for all rows
        ratios = factor[start:stop, start:] / factor.diagonal()[start:stop, None]
        part, part_ratios = work[start:stop], ratios[:, : stop - start]
        compressed = (
            rule.compress_part(start, part, part_ratios) if lookahead is None and isinstance(rule, PartRule) else None
        )
        values, errors = compressed or _one_by_one(start, part, part_ratios, rule, lookahead, span)
        work[start:stop] = values
        if stop < width:
            work[stop:].addmm_(ratios[:, stop - start :].T, errors, alpha=-1)
    return work.T


def _one_by_one(
    start: int,
    part: Float[Tensor, "part out"],
    ratios: Float[Tensor, "part part"],
    rule: ColumnRule,
    lookahead: Lookahead | None,
    span: int,
) -> tuple[Tensor, Tensor]:
    """Compress the columns from `start` on one by one; `part` is overwritten.

    Returns:
        (compressed values, errors).
    """
    columns, count, leaf = part.unbind(0), len(part), max(LEAF // span, 1) * span
    errors, new_columns = torch.empty_like(part), []
    for low in range(0, count, leaf):
        high = min(low + leaf, count)
        for i in range(low, high):
            if lookahead is not None and (start + i) % span == 0:
                lookahead(start + i, part[i : min(i + span, high)])
            new_columns.append(rule.compress(start + i, columns[i]))
            error = torch.sub(columns[i], new_columns[i], out=errors[i])
            if i + 1 < high:
                # W[:, j] -= e_i * U_ij / U_ii for the columns of this leaf
                part[i + 1 : high].addr_(ratios[i, i + 1 : high], error, alpha=-1)
        if high < count:
            part[high:].addmm_(ratios[low:high, high:].T, errors[low:high], alpha=-1)
    return torch.stack(new_columns), errors


def sweep_bytes(rows: int, width: int) -> int:
    """Return the peak memory of `sweep` in bytes.

    The working copy of the weight, and the ratios and errors of a part.
    """
    return 4 * rows * width + 4 * PART * (width + 2 * rows)


def _parts(opens: Sequence[int], width: int, span: int) -> list[tuple[int, int]]:
    """Return [start, stop) ranges of about PART columns in multiples of `span`; opened columns start new ranges."""
    ends, step = [*opens[1:], width], max(PART // span, 1) * span
    edges = [edge for start, end in zip(opens, ends, strict=True) for edge in range(start, end, step)]
    return list(zip(edges, [*edges[1:], width], strict=True))


def greedy(
    weight: Float[Tensor, "out in"],
    inverse: Float[Tensor, "in in"],
    round_to: Callable[[Float[Tensor, "rows in"], slice], Float[Tensor, "rows in"]],
    urgency: Callable[[Tensor, Tensor, slice], Float[Tensor, "rows in"]] | None = None,
    costliest: bool = False,
) -> Float[Tensor, "out in"]:
    """Round in each row the weight with the least cost next: OBQ (Frantar 2022b, algorithm 3).

    The work is out * in^3. The memory is out * in^2; rows are processed in chunks.

    Args:
        weight: the weight.
        inverse: inv(H), damped.
        round_to: round_to(values, rows) returns the nearest grid values for these rows.
        urgency: urgency(values, rounded, rows) ranks weights; those of higher urgency are rounded first at any cost.
            None: all are equal.
        costliest: whether to round the weight with the highest cost first, while many other weights can compensate for
            it.
    """
    width = weight.shape[1]
    step = max(1, CHUNK // (width * width))
    parts = [slice(start, min(start + step, weight.shape[0])) for start in range(0, weight.shape[0], step)]
    return torch.cat([_greedy_rows(weight[rows], inverse, rows, round_to, urgency, costliest) for rows in parts])


def greedy_bytes(rows: int, width: int) -> int:
    """Return the peak memory of `greedy` in bytes: one float64 inverse per row of a chunk, and copies of the weight."""
    return 8 * width * width * min(rows, max(1, CHUNK // (width * width))) + 4 * 8 * rows * width


def _greedy_rows(
    weight: Tensor,
    inverse: Tensor,
    rows: slice,
    round_to: Callable[..., Tensor],
    urgency: Callable[..., Tensor] | None,
    costliest: bool,
) -> Tensor:
    """Apply `greedy` to a chunk of rows; each row has its own inverse Hessian over the weights still to round."""
    values = weight.to(inverse.dtype, copy=True)
    is_open = torch.ones_like(values, dtype=torch.bool)
    row_index = torch.arange(values.shape[0], device=values.device)
    inverse, columns = inverse.expand(values.shape[0], -1, -1).clone(), torch.arange(values.shape[1]).to(row_index)
    columns = columns.expand(values.shape[0], -1)
    for step in range(values.shape[1]):
        count = values.shape[1] - step
        if count <= SHRINK * columns.shape[1]:  # remove the rounded columns: half of the work, and better cached
            open_columns = is_open.gather(1, columns).nonzero()[:, 1].reshape(-1, count)
            for row_inverse, open_of_row in zip(inverse, open_columns, strict=True):
                # in place: a copy would double the memory
                row_inverse[:count, :count] = row_inverse[open_of_row[:, None], open_of_row]
            inverse, columns = inverse[:, :count, :count], columns.gather(1, open_columns)
        diagonal = inverse.diagonal(dim1=1, dim2=2)
        rounded = round_to(values, rows)
        # p = argmin (quant(w_p) - w_p)^2 / [inv(H)]_pp over the weights that are not yet rounded
        cost = (rounded - values).square_().gather(1, columns) / diagonal
        cost = (cost.neg_() if costliest else cost).masked_fill_(~is_open.gather(1, columns), torch.inf)
        if urgency is not None:
            rank = urgency(values, rounded, rows).masked_fill(~is_open, -torch.inf)
            cost.masked_fill_((rank < rank.amax(1, keepdim=True)).gather(1, columns), torch.inf)
        best = cost.argmin(1)
        chosen, row, pivot = columns[row_index, best], inverse[row_index, best], diagonal[row_index, best]
        new_values = rounded[row_index, chosen]
        # w -= (w_p - quant(w_p)) / [inv(H)]_pp * inv(H)_:,p
        values.scatter_add_(1, columns, row * ((new_values - values[row_index, chosen]) / pivot)[:, None])
        values[row_index, chosen] = new_values
        is_open[row_index, chosen] = False
        # inv(H) -= inv(H)_:,p inv(H)_p,: / [inv(H)]_pp; row and column p become zero
        inverse.baddbmm_(row[:, :, None], (row / pivot[:, None])[:, None, :], alpha=-1)
        inverse[row_index, best] = 0
        inverse[row_index, :, best] = 0
    return values
