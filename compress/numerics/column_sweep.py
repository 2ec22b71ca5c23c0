"""The column sweep of optimal brain surgery: compress one column, let the later ones make up for it.

For a layer's squared output error with Hessian H = X^T X, compressing column i of W by e = w_i - q_i is best made up
for by  W[:, j] -= e / U_ii * U_ij  for all j > i, with inv(H) = U^T U, U upper (GPTQ, Frantar 2022, algorithm 1;
SparseGPT, Frantar 2023, algorithm 1). What happens to a column (rounding, pruning, both) is the rule's affair.

Columns are worked on in parts; the update of everything after a part is one matrix product, and inside a part the
same is done for leaves of a few columns, so that the inner loop touches little memory and launches few operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

PART = 128  # columns per lazy update of the rest (GPTQ, section 3.3, step 2)
LEAF = 16  # columns per lazy update inside a part; measured best of 8, 16, 32 on widths 576 and 1536
SHRINK = 0.8  # of the columns of an inverse are left when it is cut down to them
CHUNK = 1 << 24  # numbers of the inverse Hessians that the greedy order holds at once, one inverse per row


class ColumnRule(Protocol):
    """What a method does with columns; columns are handed over as rows of the transposed weight."""

    def starts(self, width: int) -> Sequence[int]:
        """Columns at which `open` must be called, ascending, the first 0."""
        ...

    def open(self, column: int, rest: Float[Tensor, "rest out"]) -> None:
        """All earlier columns are compressed and made up for; `rest` holds the columns from `column` on."""
        ...

    def compress(self, column: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        """The values that column `column` will have from now on."""
        ...


Lookahead = Callable[[int, Float[Tensor, "span out"]], None]
"""look(column, near): the columns from `column` on that are decided together, with all earlier ones made up for."""


def sweep(
    weight: Float[Tensor, "out in"],
    factor: Float[Tensor, "in in"],
    rule: ColumnRule,
    lookahead: Lookahead | None = None,
    span: int = 1,
) -> Float[Tensor, "out in"]:
    """Compress all columns in order by `rule`; returns the compressed weight, and `weight` is left alone.

    factor: U of `linalg.inverse_factor`, in the order of the columns. look: called before every `span` columns, fewer
    at the end, beside what the rule is told; the rule may open only where such columns begin.
    """
    work = weight.T.clone(memory_format=torch.contiguous_format)  # [in, out]: a column is contiguous
    columns, width = work.unbind(0), work.shape[0]
    # e_i / U_ii * U_ij = e_i * (U_ij / U_ii), and the second factor is the same for all rows
    ratios = factor / factor.diagonal()[:, None]
    opens = set(rule.starts(width))
    new: list[Tensor] = []
    leaf = max(LEAF // span, 1) * span
    for start, stop in _parts(sorted(opens), width, span):
        if start in opens:
            rule.open(start, work[start:])
        errors = torch.empty(stop - start, work.shape[1], dtype=work.dtype, device=work.device)
        for low in range(start, stop, leaf):
            high = min(low + leaf, stop)
            for i in range(low, high):
                if lookahead is not None and i % span == 0:
                    lookahead(i, work[i : min(i + span, high)])
                new.append(rule.compress(i, columns[i]))
                error = torch.sub(columns[i], new[i], out=errors[i - start])
                if i + 1 < high:
                    # W[:, j] -= e_i * U_ij / U_ii for the columns of this leaf
                    work[i + 1 : high].addr_(ratios[i, i + 1 : high], error, alpha=-1)
            if high < stop:
                work[high:stop].addmm_(ratios[low:high, high:stop].T, errors[low - start : high - start], alpha=-1)
        if stop < width:
            work[stop:].addmm_(ratios[start:stop, stop:].T, errors, alpha=-1)
    return torch.stack(new, dim=1)


def sweep_bytes(rows: int, width: int) -> int:
    """What `sweep` holds at its peak: ratios, and the weight as it is worked on, in new columns, and in one piece."""
    return 4 * width * width + 3 * 4 * rows * width


def _parts(opens: Sequence[int], width: int, span: int) -> list[tuple[int, int]]:
    """[start, stop) ranges of about PART columns, whole spans, that begin anew at every opened column."""
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
    """Round in each row the weight next that costs least: OBQ (Frantar 2022b, algorithm 3); exact, and slow.

    inverse: inv(H), damped. round_to(values, rows): the grid's nearest values for these rows. urgency(values, rounded,
    rows): weights of higher urgency go first, whatever they cost (None: all alike). costliest: the weight that costs
    most instead, while many are left to make up for it. Work is out * in^3, memory out * in^2 cut into chunks of rows.
    """
    width = weight.shape[1]
    step = max(1, CHUNK // (width * width))
    parts = [slice(start, min(start + step, weight.shape[0])) for start in range(0, weight.shape[0], step)]
    return torch.cat([_greedy_rows(weight[rows], inverse, rows, round_to, urgency, costliest) for rows in parts])


def greedy_bytes(rows: int, width: int) -> int:
    """What `greedy` holds at its peak in float64: an inverse for each row of a chunk, and copies of the weight."""
    return 8 * width * width * min(rows, max(1, CHUNK // (width * width))) + 4 * 8 * rows * width


def _greedy_rows(
    weight: Tensor, inverse: Tensor, rows: slice, round_to: Callable[..., Tensor],
    urgency: Callable[..., Tensor] | None, costliest: bool,
) -> Tensor:  # fmt: skip
    """`greedy` for some rows; each has an inverse Hessian of its own, of what is left in it."""
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
