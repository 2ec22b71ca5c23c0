"""The scale search 'importance': the least rounding error, weighted by the importance of each column.

The error of a group is sum_j h_j (w_j - Q(w_j))^2. With h_j the mean square of input j, as in the importance matrix of
llama.cpp, that is the error of the output for independent inputs. A sweep that compensates errors in later columns
has an h_j of its own (`importance_of`). A range gives codes; these give the scale (and the minimum) of the least
error by linear regression (llama.cpp, ggml-quants.c, make_qx_quants and make_qkx3_quants).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.native import columns as native
from compress.native.columns import Integers
from compress.numerics.quant.grids import Grid

CUTS = tuple(-1 + 0.2 * step for step in range(20))
"""The ranges to try: n / (n + cut) of a group's range, with n steps between its largest weight and zero (or its end).

llama.cpp cuts -0.9 to 0.9 steps; weights with large inputs can be worth more.
"""
CHUNK = 1 << 17  # weights per step: the cache of a processor holds the temporary tensors
GPU_CHUNK = 1 << 25  # the same on a GPU, where small steps take the time of their launches

Sums = list[Tensor]


def importance_of(factor: Float[Tensor, "in in"], order: Int[Tensor, " in"] | None) -> Float[Tensor, " in"]:
    """The importance of each column in the sweep of GPTQ: an error e costs e^2 / U_jj^2 after its compensation.

    factor: U of `linalg.inverse_factor`, its columns in `order`. The result is in the original order, with mean 1.
    """
    found = 1 / factor.diagonal().square()
    found = found / found.mean()
    return found if order is None else torch.empty_like(found).index_copy_(0, order, found)


class WeightedSearch:
    """The best scale and zero (or minimum) of each group, [rows, groups], in their stored form.

    parts: the groups of a weight. dtype, shared: as in `codes.fit`. signed: a scale without a zero point may be
    negative.
    """

    def __init__(
        self,
        parts: Float[Tensor, "rows groups size"],
        importance: Float[Tensor, "groups size"],
        grid: Grid,
        symmetric: bool,
        dtype: torch.dtype,
        shared: Tensor | None,
        signed: bool = False,
    ) -> None:
        self._at_once = grid.integers is not None and native.usable(parts)
        self.parts = parts.contiguous() if self._at_once else parts  # not copied again for every range
        self.importance, self.grid, self.symmetric = importance, grid, symmetric
        self.dtype, self.shared, self.signed = dtype, shared, signed or grid.scaling.signed
        self._error = torch.full(parts.shape[:2], math.inf, device=parts.device)
        self._scale, self._zero = torch.ones_like(self._error), None if symmetric else torch.zeros_like(self._error)

    def best(self) -> tuple[Tensor, Tensor | None]:
        """Try all ranges: each as it is, then the regression on its codes."""
        low, high = torch.aminmax(self.parts, dim=-1)
        count = 2 ** (self.grid.bits - 1) if self.symmetric else 2**self.grid.bits - 1
        # weights whose squares are not finite keep the whole range
        self._scale, self._zero = self.grid.fit(low, high, self.symmetric, self.dtype, self.shared)
        for cut in CUTS:
            kept = count / (count + max(cut, -count / 2))
            ends = (low, low + kept * (high - low)) if self.grid.offset else (low * kept, high * kept)
            scale, zero = self.grid.fit(*ends, self.symmetric, self.dtype, self.shared)
            for sign in (1, -1) if self.signed and zero is None else (1,):
                sums = self._try(scale * sign, zero, summed=True)
                self._try(*self._regression(sums, zero), summed=False)
        return self._scale, self._zero

    def _try(self, scale: Tensor, zero: Tensor | None, summed: bool) -> Sums:
        """Keep the scale and zero where the error is less; returns the sums for the regression, or none of them."""
        error, *added = self._summed(scale, zero, summed)
        better = error < self._error
        self._error = torch.where(better, error, self._error)
        self._scale = torch.where(better, scale, self._scale)
        if zero is not None and self._zero is not None:
            self._zero = torch.where(better, zero, self._zero)
        return added

    def _summed(self, scale: Tensor, zero: Tensor | None, summed: bool) -> Sums:
        """For each group the error, then the sums."""
        limits = self.grid.integers
        if self._at_once and limits is not None:
            return native.group_sums(self.parts, self.importance, Integers(*limits, scale, zero), summed)
        chunk = CHUNK if self.parts.device.type == "cpu" else GPU_CHUNK
        count = max(1, chunk // self.parts[0].numel())
        found = [
            self._tried(part, scale[top : top + count], None if zero is None else zero[top : top + count], summed)
            for top, part in ((top, self.parts[top : top + count]) for top in range(0, len(self.parts), count))
        ]
        return [torch.cat(each) for each in zip(*found, strict=True)]

    def _tried(self, part: Tensor, scale: Tensor, zero: Tensor | None, summed: bool) -> Sums:
        """For some rows: the error, then the sums."""
        step, shift = scale[..., None], None if zero is None else zero[..., None]
        codes = self.grid.encode(part, step, shift)
        error = self.grid.decode(codes, step, shift).sub_(part).square_().mul_(self.importance).sum(-1)
        return [error, *(self._sums(codes, part, shift) if summed else ())]

    def _sums(self, codes: Tensor, part: Tensor, shift: Tensor | None) -> Sums:
        """Sums weighted by h of L^2 and L w, with L the levels of the codes; of L and w if the grid has minima, too."""
        if self.grid.offset:
            weighted = codes * self.importance
            more = [weighted.sum(-1), (part * self.importance).sum(-1)]
            return [(weighted * codes).sum(-1), (weighted * part).sum(-1), *more]
        levels = self.grid.decode(codes, torch.ones_like(part[:1, :1, :1]), shift)
        weighted = levels * self.importance
        return [levels.mul_(weighted).sum(-1), weighted.mul_(part).sum(-1)]

    def _regression(self, sums: Sums, zero: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The scale, and the minimum if the grid has one, with the least error for some codes, in their stored form."""
        xx, xy, *more = sums
        if not self.grid.offset:
            return self._stored(xy / xx), zero
        x, y = more
        total = self.importance.sum(-1)
        scale = (total * xy - x * y) / (total * xx - x.square())
        minimum = ((y - scale * x) / total).nan_to_num(0.0, 0.0, 0.0)
        if self.grid.scaling.stored is not None:
            minimum = minimum.clamp(max=0)
        minimum = self.grid.scaling.round_minimum(minimum, self.dtype, self.shared)
        return self._stored(((xy - minimum * x) / xx).clamp(min=0)), minimum

    def _stored(self, scale: Tensor) -> Tensor:
        """A scale in its stored form; that of a group of zeros is any positive number."""
        scale, span = scale.nan_to_num(0.0, 0.0, 0.0), self.grid.span
        size = self.grid.scaling.round(scale.abs() * span, span, self.dtype, self.shared)
        return torch.where(scale < 0, -size, size) if self.signed else size
