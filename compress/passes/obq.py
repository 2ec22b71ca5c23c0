"""OBQ: round next, in every row, the weight that costs least, and let the others make up for it (Frantar 2022b)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from compress.api.memory import ProblemSize
from compress.api.observers import Gram, Observer
from compress.api.passes import Layer
from compress.errors import TargetError
from compress.families.quantizing import QuantizingPass
from compress.numerics.column_sweep import greedy, greedy_bytes
from compress.numerics.linalg import DAMPING, factor_bytes
from compress.numerics.quant.codes import Codes, GroupSize, fit, spread, store
from compress.numerics.quant.grids import Grid

NUMBERS_PER_SECOND = 4e8  # what one core works off, to say how long a layer will take
FAR = 1e6  # scales beyond the ends of every grid
HOURS = 2.0  # default of `limit`


class OBQ(QuantizingPass):
    """Minimize ||W X - Q X||^2 greedily over single weights; what GPTQ approximates, for small layers.

    Scales are fixed beforehand. Weights that the others have pushed off the grid go first (Frantar 2022b, section 5).
    The paper's order, the cheapest weight next, leaves the dearest to the end, when nothing can make up for them: where
    a few inputs are far larger than the rest, as in language models, or steps are unequal (nf4), GPTQ has less error,
    and `costliest`, the other way round, about as little.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2208.11580"
    observes: ClassVar[type[Observer]] = Gram

    damping: float = Field(default=DAMPING, gt=0, le=1, description="added to the diagonal, as a share of its mean")
    order: Literal["cheapest", "costliest"] = Field(
        default="cheapest", description="which weight of a row is next: that of least cost (the paper's), or of most"
    )
    limit: float = Field(default=HOURS, gt=0, description="hours that one layer may take by estimate; beyond: an error")

    def memory(self, size: ProblemSize) -> int:
        width = size.shape[1]
        return super().memory(size) + max(factor_bytes(width), greedy_bytes(*size.shape) + 2 * 8 * width**2)

    def codes(self, weight: Float[Tensor, "out in"], seen: Gram, layer: Layer) -> Codes:
        self._check_size(weight, layer)
        upper = seen.factor_of(layer.name, layer.log, self.damping).double()
        weight = weight.float() if layer.mask is None else weight.float() * layer.mask
        scale, zero = fit(weight, self.grid, self.group_size, self.symmetric, self.scale, layer.storage)
        nearest = _Nearest(self.grid, weight.shape, scale, zero, self.group_size, layer.mask)
        costliest = self.order == "costliest"
        found = greedy(weight.double(), upper.T @ upper, nearest, nearest.urgency, costliest).float()
        codes = store(nearest.encode(found, slice(None)), self.grid)
        return Codes(codes, scale, zero, self.grid, self.group_size)

    def _check_size(self, weight: Tensor, layer: Layer) -> None:
        rows, width = weight.shape
        hours = rows * width**3 / NUMBERS_PER_SECOND / 3600
        if hours > self.limit:
            raise TargetError(
                f"{layer.name}: {rows} x {width} is too large for obq, it would take about {hours:.3g} hours; "
                f"use gptq, leave the layer out (ignore), or raise limit (now {self.limit:g})"
            )


class _Nearest:
    """The nearest values of the grid at scales that stay; weights outside of the mask are zero."""

    def __init__(
        self,
        grid: Grid,
        shape: torch.Size,
        scale: Float[Tensor, "out groups"],
        zero: Float[Tensor, "out groups"] | None,
        group_size: GroupSize,
        mask: Bool[Tensor, "out in"] | None,
    ) -> None:
        self.grid, self.mask = grid, mask
        self.scale = spread(scale, shape[1], group_size).expand(shape)
        self.zero = None if zero is None else spread(zero, shape[1], group_size).expand(shape)
        low, high = (grid.decode(grid.encode(far * scale, scale, zero), scale, zero) for far in (-FAR, FAR))
        slack = (high - low) / (2**grid.bits - 1) / 2
        self.low = spread(low - slack, shape[1], group_size).expand(shape)
        self.high = spread(high + slack, shape[1], group_size).expand(shape)

    def encode(self, values: Float[Tensor, "rows in"], rows: slice) -> Float[Tensor, "rows in"]:
        values = values.float() if self.mask is None else values.float() * self.mask[rows]
        return self.grid.encode(values, self.scale[rows], None if self.zero is None else self.zero[rows])

    def __call__(self, values: Float[Tensor, "rows in"], rows: slice) -> Float[Tensor, "rows in"]:
        zero = None if self.zero is None else self.zero[rows]
        return self.grid.decode(self.encode(values, rows), self.scale[rows], zero).to(values.dtype)

    def urgency(self, values: Tensor, rounded: Tensor, rows: slice) -> Float[Tensor, "rows in"]:
        """2 for what is pruned, 1 for what is beyond the grid's ends by more than half a mean step, otherwise 0."""
        urgent = ((values > self.high[rows]) | (values < self.low[rows])).to(values.dtype)
        return urgent if self.mask is None else urgent.masked_fill_(~self.mask[rows], 2)
