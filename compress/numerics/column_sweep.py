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
SHRINK = 0.8  # an inverse is cut down when at most this fraction of its columns is left
CHUNK = 1 << 24  # elements of the inverse Hessians that the greedy order holds at once, one inverse per row


class ColumnRule(Protocol):
    """How a method compresses columns; a column is passed as a row of the transposed weight."""

    def starts(self, width: int) -> Sequence[int]:
        """The columns at which `open` must be called, ascending; the first is 0."""
        ...

    def open(self, column: int, rest: Float[Tensor, "rest out"]) -> None:
        """Begin at `column`: earlier columns are compressed and compensated; `rest` holds `column` and later."""
        ...

    def compress(self, column: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        """The compressed values of `column`."""
        ...


@runtime_checkable
class PartRule(ColumnRule, Protocol):
    """A rule that may compress several columns in one call."""

    def compress_part(
        self, column: int, values: Float[Tensor, "part out"], ratios: Float[Tensor, "part part"]
    ) -> tuple[Tensor, Tensor] | None:
        """(compressed values, errors) of the columns from `column` on, [part, out] each; None: one after the other.

        The error of column i times ratios[i, j] is to be subtracted from the columns j behind it. values: unchanged.
        """
        ...


Lookahead = Callable[[int, Float[Tensor, "span out"]], None]
"""lookahead(column, near): `near` holds the columns from `column` on that are decided together, compensated for all
earlier ones."""


def sweep(
    weight: Float[Tensor, "out in"],
    factor: Float[Tensor, "in in"],
    rule: ColumnRule,
    lookahead: Lookahead | None = None,
    span: int = 1,
) -> Float[Tensor, "out in"]:
    """Compress all columns in order by `rule` and return the compressed weight; `weight` is not changed.

    factor: U of `linalg.inverse_factor`, in the order of the columns. lookahead: called before every `span` columns
    (fewer at the end), in addition to the methods of the rule. The rule may open groups only at multiples of `span`.
    """
    work = weight.T.clone(memory_format=torch.contiguous_format)  # [in, out]: a column is contiguous
    width = work.shape[0]
    # e_i / U_ii * U_ij = e_i * (U_ij / U_ii); the second factor is the same for all rows
    ratios = factor / factor.diagonal()[:, None]
    opens = set(rule.starts(width))
    new: list[Tensor] = []
    for start, stop in _parts(sorted(opens), width, span):
        if start in opens:
            rule.open(start, work[start:])
        part, between = work[start:stop], ratios[start:stop, start:stop]
        at_once = rule.compress_part(start, part, between) if lookahead is None and isinstance(rule, PartRule) else None
        values, errors = at_once or _one_by_one(start, part, between, rule, lookahead, span)
        new.append(values)
        if stop < width:
            work[stop:].addmm_(ratios[start:stop, stop:].T, errors, alpha=-1)
    return torch.cat(new).T.contiguous()


def _one_by_one(
    start: int,
    part: Float[Tensor, "part out"],
    ratios: Float[Tensor, "part part"],
    rule: ColumnRule,
    lookahead: Lookahead | None,
    span: int,
) -> tuple[Tensor, Tensor]:
    """(compressed values, errors) of the columns from `start` on; `part` is overwritten."""
    columns, count, leaf = part.unbind(0), len(part), max(LEAF // span, 1) * span
    errors, new = torch.empty_like(part), []
    for low in range(0, count, leaf):
        high = min(low + leaf, count)
        for i in range(low, high):
            if lookahead is not None and (start + i) % span == 0:
                lookahead(start + i, part[i : min(i + span, high)])
            new.append(rule.compress(start + i, columns[i]))
            error = torch.sub(columns[i], new[i], out=errors[i])
            if i + 1 < high:
                # W[:, j] -= e_i * U_ij / U_ii for the columns of this leaf
                part[i + 1 : high].addr_(ratios[i, i + 1 : high], error, alpha=-1)
        if high < count:
            part[high:].addmm_(ratios[low:high, high:].T, errors[low:high], alpha=-1)
    return torch.stack(new), errors


def sweep_bytes(rows: int, width: int) -> int:
    """Peak memory of `sweep`: the ratios, and three copies of the weight (working copy, new columns, stacked)."""
    return 4 * width * width + 3 * 4 * rows * width


def _parts(opens: Sequence[int], width: int, span: int) -> list[tuple[int, int]]:
    """[start, stop) ranges of about PART columns in whole spans; every opened column starts a new range."""
    ends, step = [*opens[1:], width], max(PART // span, 1) * span
    edges = [cut for start, end in zip(opens, ends, strict=True) for cut in range(start, end, step)]
    return list(zip(edges, [*edges[1:], width], strict=True))


def greedy(
    weight: Float[Tensor, "out in"],
    inverse: Float[Tensor, "in in"],
    round_to: Callable[[Float[Tensor, "rows in"], slice], Float[Tensor, "rows in"]],
    urgency: Callable[[Tensor, Tensor, slice], Float[Tensor, "rows in"]] | None = None,
    costliest: bool = False,
) -> Float[Tensor, "out in"]:
    """Round in each row the weight with the least cost next: OBQ (Frantar 2022b, algorithm 3); exact, and slow.

    inverse: inv(H), damped. round_to(values, rows): the nearest grid values for these rows. urgency(values, rounded,
    rows): weights of higher urgency are rounded first at any cost (None: all equal). costliest: round the weight with
    the highest cost first, while many others are left to compensate for it. Work is out * in^3; memory is out * in^2,
    processed in chunks of rows.
    """
    width = weight.shape[1]
    step = max(1, CHUNK // (width * width))
    parts = [slice(start, min(start + step, weight.shape[0])) for start in range(0, weight.shape[0], step)]
    return torch.cat([_greedy_rows(weight[rows], inverse, rows, round_to, urgency, costliest) for rows in parts])


def greedy_bytes(rows: int, width: int) -> int:
    """Peak memory of `greedy` in float64: one inverse per row of a chunk, and copies of the weight."""
    return 8 * width * width * min(rows, max(1, CHUNK // (width * width))) + 4 * 8 * rows * width


def _greedy_rows(
    weight: Tensor,
    inverse: Tensor,
    rows: slice,
    round_to: Callable[..., Tensor],
    urgency: Callable[..., Tensor] | None,
    costliest: bool,
) -> Tensor:
    """`greedy` for some rows; each row has its own inverse Hessian over the weights that are left in it."""
    values = weight.to(inverse.dtype, copy=True)
    left = torch.ones_like(values, dtype=torch.bool)
    each = torch.arange(values.shape[0], device=values.device)
    inverse, columns = inverse.expand(values.shape[0], -1, -1).clone(), torch.arange(values.shape[1]).to(each)
    columns = columns.expand(values.shape[0], -1)
    for step in range(values.shape[1]):
        count = values.shape[1] - step
        if count <= SHRINK * columns.shape[1]:  # leave out what is gone: half of the work, and better cached
            kept = left.gather(1, columns).nonzero()[:, 1].reshape(-1, count)
            for one, at in zip(inverse, kept, strict=True):  # in place: a second one would double the memory
                one[:count, :count] = one[at[:, None], at]
            inverse, columns = inverse[:, :count, :count], columns.gather(1, kept)
        diagonal = inverse.diagonal(dim1=1, dim2=2)
        rounded = round_to(values, rows)
        # p = argmin (quant(w_p) - w_p)^2 / [inv(H)]_pp over the weights that are left
        cost = (rounded - values).square_().gather(1, columns) / diagonal
        cost = (cost.neg_() if costliest else cost).masked_fill_(~left.gather(1, columns), torch.inf)
        if urgency is not None:
            rank = urgency(values, rounded, rows).masked_fill(~left, -torch.inf)
            cost.masked_fill_((rank < rank.amax(1, keepdim=True)).gather(1, columns), torch.inf)
        at = cost.argmin(1)
        chosen, row, pivot = columns[each, at], inverse[each, at], diagonal[each, at]
        new = rounded[each, chosen]
        # w -= (w_p - quant(w_p)) / [inv(H)]_pp * inv(H)_:,p
        values.scatter_add_(1, columns, row * ((new - values[each, chosen]) / pivot)[:, None])
        values[each, chosen] = new
        left[each, chosen] = False
        # inv(H) -= inv(H)_:,p inv(H)_p,: / [inv(H)]_pp, after which row and column p are gone
        inverse.baddbmm_(row[:, :, None], (row / pivot[:, None])[:, None, :], alpha=-1)
        inverse[each, at] = 0
        inverse[each, :, at] = 0
    return values
