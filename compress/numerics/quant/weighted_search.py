"""The scale search 'importance': least rounding error, weighted by the importance of each column.

The error of a group is sum_j h_j (w_j - Q(w_j))^2. With h_j the mean square of input j, as in the importance matrix of
llama.cpp, that is the error of the output for independent inputs. A sweep that compensates errors in later columns
has a different h_j (`importance_of`). A range gives codes; these give the scale (and the minimum) of the least
error by linear regression (llama.cpp, ggml-quants.c, make_qx_quants and make_qkx3_quants).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.native import columns as native
from compress.numerics.quant.grids import Grid

CUTS = tuple(-1 + 0.2 * step for step in range(20))
"""The ranges to try: n / (n + cut) of a group's range, with n steps between its largest weight and zero (or its end).

llama.cpp cuts -0.9 to 0.9 steps; weights with large inputs can be worth more.
"""
CHUNK = 1 << 17  # weights per step: the cache of a processor holds the temporary tensors
GPU_CHUNK = 1 << 25  # weights per step on a GPU, where launches dominate small steps

Sums = list[Tensor]


def importance_of(factor: Float[Tensor, "in in"], order: Int[Tensor, " in"] | None) -> Float[Tensor, " in"]:
    """Compute the importance of each column in the sweep of GPTQ: an error e costs e^2 / U_jj^2 after its compensation.

    Args:
        factor: U of `linalg.inverse_factor`, its columns in `order`.
        order: column of each step of the sweep; None: unchanged.

    Returns:
        The importance in the original order of the columns, with mean 1.
    """
    importance = 1 / factor.diagonal().square()
    importance = importance / importance.mean()
    return importance if order is None else torch.empty_like(importance).index_copy_(0, order, importance)


class WeightedSearch:
    """Search of the best scale and zero point (or minimum) of each group, [rows, groups], in their stored form.

    Args:
        parts: the groups of a weight.
        importance: weight of the squared error of each column.
        grid: the number grid.
        symmetric: whether to search without zero points.
        dtype: as in `codes.fit`.
        shared: as in `codes.fit`.
        signed: whether a scale without a zero point may be negative.
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
        self.importance, self.grid, self.symmetric = importance, grid, symmetric
        self.dtype, self.shared, self.signed = dtype, shared, signed or grid.scaling.signed
        self._error = torch.full(parts.shape[:2], math.inf, device=parts.device)
        self._scale, self._zero = torch.ones_like(self._error), None if symmetric else torch.zeros_like(self._error)
        self._at_once = native.usable(parts, grid.scaled(self._scale, self._zero))
        self.parts = parts.contiguous() if self._at_once else parts  # not copied again for every range

    def best(self) -> tuple[Tensor, Tensor | None]:
        """Try all ranges: each one unchanged, then the regression on its codes."""
        low, high = torch.aminmax(self.parts, dim=-1)
        count = 2 ** (self.grid.bits - 1) if self.symmetric else 2**self.grid.bits - 1
        # groups with squares that are not finite keep the whole range
        self._scale, self._zero = self.grid.fit(low, high, self.symmetric, self.dtype, self.shared)
        for cut in CUTS:
            fraction = count / (count + max(cut, -count / 2))
            ends = (low, low + fraction * (high - low)) if self.grid.offset else (low * fraction, high * fraction)
            scale, zero = self.grid.fit(*ends, self.symmetric, self.dtype, self.shared)
            for sign in (1, -1) if self.signed and zero is None else (1,):
                sums = self._try(scale * sign, zero, with_sums=True)
                self._try(*self._regression(sums, zero), with_sums=False)
        return self._scale, self._zero

    def _try(self, scale: Tensor, zero: Tensor | None, with_sums: bool) -> Sums:
        """Update the scale and zero point where the error is smaller.

        Returns:
            The sums for the regression; empty without `with_sums`.
        """
        error, *sums = self._summed(scale, zero, with_sums)
        better = error < self._error
        self._error = torch.where(better, error, self._error)
        self._scale = torch.where(better, scale, self._scale)
        if zero is not None and self._zero is not None:
            self._zero = torch.where(better, zero, self._zero)
        return sums

    def _summed(self, scale: Tensor, zero: Tensor | None, with_sums: bool) -> Sums:
        """Compute the error of each group, then the sums."""
        scaled = self.grid.scaled(scale, zero)
        if self._at_once and scaled is not None:
            return native.group_sums(self.parts, self.importance, scaled, with_sums)
        chunk = CHUNK if self.parts.device.type == "cpu" else GPU_CHUNK
        count = max(1, chunk // self.parts[0].numel())
        chunk_sums = [
            self._tried(part, scale[top : top + count], None if zero is None else zero[top : top + count], with_sums)
            for top, part in ((top, self.parts[top : top + count]) for top in range(0, len(self.parts), count))
        ]
        return [torch.cat(sums) for sums in zip(*chunk_sums, strict=True)]

    def _tried(self, part: Tensor, scale: Tensor, zero: Tensor | None, with_sums: bool) -> Sums:
        """Compute the error, then the sums, for a chunk of rows."""
        step, shift = scale[..., None], None if zero is None else zero[..., None]
        codes = self.grid.encode(part, step, shift)
        error = self.grid.decode(codes, step, shift).sub_(part).square_().mul_(self.importance).sum(-1)
        return [error, *(self._sums(codes, part, shift) if with_sums else ())]

    def _sums(self, codes: Tensor, part: Tensor, shift: Tensor | None) -> Sums:
        """Sum L^2 and L w, weighted by h, with L the levels of the codes; if the grid has minima, also L and w."""
        if self.grid.offset:
            weighted = codes * self.importance
            minimum_sums = [weighted.sum(-1), (part * self.importance).sum(-1)]
            return [(weighted * codes).sum(-1), (weighted * part).sum(-1), *minimum_sums]
        levels = self.grid.decode(codes, torch.ones_like(part[:1, :1, :1]), shift)
        weighted = levels * self.importance
        return [levels.mul_(weighted).sum(-1), weighted.mul_(part).sum(-1)]

    def _regression(self, sums: Sums, zero: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Solve for the scale (and the minimum, if any) with the least error for fixed codes, in their stored form."""
        xx, xy, *minimum_sums = sums
        if not self.grid.offset:
            return self._stored(xy / xx), zero
        x, y = minimum_sums
        total = self.importance.sum(-1)
        scale = (total * xy - x * y) / (total * xx - x.square())
        minimum = ((y - scale * x) / total).nan_to_num(0.0, 0.0, 0.0)
        if self.grid.scaling.stored is not None:
            minimum = minimum.clamp(max=0)
        minimum = self.grid.scaling.round_minimum(minimum, self.dtype, self.shared)
        return self._stored(((xy - minimum * x) / xx).clamp(min=0)), minimum

    def _stored(self, scale: Tensor) -> Tensor:
        """Round a scale to its stored form; that of a group of zeros is any positive number."""
        scale, span = scale.nan_to_num(0.0, 0.0, 0.0), self.grid.span
        size = self.grid.scaling.round(scale.abs() * span, span, self.dtype, self.shared)
        return torch.where(scale < 0, -size, size) if self.signed else size
