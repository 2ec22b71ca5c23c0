"""The column sweep of optimal brain surgery: compress one column, let the later ones make up for it.

For a layer's squared output error with Hessian H = X^T X, compressing column i of W by e = w_i - q_i is best made up
for by  W[:, j] -= e / U_ii * U_ij  for all j > i, with inv(H) = U^T U, U upper (GPTQ, Frantar 2022, algorithm 1;
SparseGPT, Frantar 2023, algorithm 1). What happens to a column (rounding, pruning, both) is the rule's affair.

Columns are worked on in parts; the update of everything after a part is one matrix product, and inside a part the
same is done for leaves of a few columns, so that the inner loop touches little memory and launches few operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

PART = 128  # columns per lazy update of the rest (GPTQ, section 3.3, step 2)
LEAF = 16  # columns per lazy update inside a part; measured best of 8, 16, 32 on widths 576 and 1536


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


def sweep(weight: Float[Tensor, "out in"], factor: Float[Tensor, "in in"], rule: ColumnRule) -> Float[Tensor, "out in"]:
    """Compress all columns in order by `rule`; returns the compressed weight, and `weight` is left alone.

    factor: U of `linalg.inverse_factor`, in the order of the columns.
    """
    work = weight.T.clone(memory_format=torch.contiguous_format)  # [in, out]: a column is contiguous
    width = work.shape[0]
    diagonal = factor.diagonal().tolist()
    opens = set(rule.starts(width))
    for start, stop in _parts(sorted(opens), width):
        if start in opens:
            rule.open(start, work[start:])
        errors = torch.empty(stop - start, work.shape[1], dtype=work.dtype, device=work.device)
        for low in range(start, stop, LEAF):
            high = min(low + LEAF, stop)
            for i in range(low, high):
                new = rule.compress(i, work[i])
                error = torch.sub(work[i], new, out=errors[i - start]).div_(diagonal[i])
                work[i] = new
                if i + 1 < high:
                    # W[:, j] -= err * U_ij for the columns of this leaf
                    work[i + 1 : high].addr_(factor[i, i + 1 : high], error, alpha=-1)
            if high < stop:
                work[high:stop].addmm_(factor[low:high, high:stop].T, errors[low - start : high - start], alpha=-1)
        if stop < width:
            work[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return work.T.contiguous()


def _parts(opens: Sequence[int], width: int) -> list[tuple[int, int]]:
    """[start, stop) ranges of at most PART columns that begin anew at every opened column."""
    ends = [*opens[1:], width]
    edges = [cut for start, end in zip(opens, ends, strict=True) for cut in range(start, end, PART)]
    return list(zip(edges, [*edges[1:], width], strict=True))
