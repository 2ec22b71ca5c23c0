"""OBQ: in each row, round the weight with the least cost next; the other weights compensate (Frantar 2022b)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from compress.layers.scheme import LayerScheme
from compress.numerics.column_sweep import greedy, greedy_bytes
from compress.numerics.division import divided
from compress.numerics.linalg import factor_bytes
from compress.numerics.quant.codes import Codes, GroupSize, fit, spread, store
from compress.numerics.quant.grids import Grid
from compress.passes.contract.facts import Effects
from compress.passes.contract.layers import Layer
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram, Observer
from compress.passes.families.compensation import Regularized
from compress.passes.families.quantizing import QuantizingPass

NUMBERS_PER_SECOND = 4e8  # measured on one core; to estimate the time of a layer
FAR = 1e6  # scales beyond the ends of every grid
HOURS = 2.0  # default of `limit`


class OBQ(Regularized, QuantizingPass):
    """Quantize one weight after the other, compensated by all remaining weights of its row; slow, for small layers.

    Minimize ||W X - Q X||^2 greedily over single weights, for small layers; GPTQ approximates this method. Scales are
    fixed before the sweep. Weights that updates have moved beyond the ends of the grid are rounded first (Frantar
    2022b, section 5).

    The paper's order rounds the weight with the least cost next. So the weights with the largest cost come last, when
    no other weights can compensate them. GPTQ has a smaller error if a few inputs are far larger than the others (as in
    language models), or if steps are unequal (nf4). The reverse order, `costliest`, has about the error of GPTQ.
    """

    use_for: ClassVar[str] = "Small layers and studies: the exact method that gptq approximates."
    not_for: ClassVar[str] = (
        "Whole language models: a minute and more for each layer, and no gain over gptq with act_order: static."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2208.11580"
    observes: ClassVar[type[Observer]] = Gram

    order: Literal["cheapest", "costliest"] = Field(
        default="cheapest",
        description="next weight of a row: the one with the least cost (as in the paper), or with the largest",
    )
    limit: float = Field(
        default=HOURS, gt=0, description="largest estimated time of one layer in hours; a longer estimate is an error"
    )

    def effects(self, layer: LayerScheme) -> Effects:
        effects, (rows, width) = super().effects(layer), layer.shape
        hours = rows * width**3 / NUMBERS_PER_SECOND / 3600
        if effects.problem is not None or hours <= self.limit:
            return effects
        problem = (
            f"{rows} x {width} is too large for obq: the layer takes about {hours:.3g} hours; use gptq, leave the "
            f"layer out (ignore), or raise limit (now {self.limit:g})"
        )
        return replace(effects, problem=problem)

    def memory(self, size: ProblemSize) -> int:
        width = size.shape[1]
        return super().memory(size) + max(factor_bytes(width), greedy_bytes(*size.shape) + 2 * 8 * width**2)

    def codes(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> Codes:
        upper = statistics.factor_of(layer.name, layer.log, self.regularization).double()
        weight = weight.float() if layer.mask is None else weight.float() * layer.mask
        options = self.symmetric, self.scale, layer.storage
        scale, zero = fit(weight, self.grid, self.group_size, *options, signed=self.signed(layer))
        nearest = _Nearest(self.grid, weight.shape, scale, zero, self.group_size, layer.mask)
        costliest = self.order == "costliest"
        rounded = greedy(weight.double(), upper.T @ upper, nearest, nearest.urgency, costliest).float()
        codes = store(nearest.encode(rounded, slice(None)), self.grid)
        return Codes(codes, scale, zero, self.grid, self.group_size)


class _Nearest:
    """Round to the nearest values of the grid with fixed scales; weights outside of the mask become zero."""

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
        ends = [grid.decode(grid.encode(far * scale, scale, zero), scale, zero) for far in (-FAR, FAR)]
        low, high = torch.minimum(*ends), torch.maximum(*ends)  # of a negative scale, the lowest code is the highest
        slack = divided(high - low, 2**grid.bits - 1) / 2
        self.low = spread(low - slack, shape[1], group_size).expand(shape)
        self.high = spread(high + slack, shape[1], group_size).expand(shape)

    def encode(self, values: Float[Tensor, "rows in"], rows: slice) -> Float[Tensor, "rows in"]:
        values = values.float() if self.mask is None else values.float() * self.mask[rows]
        return self.grid.encode(values, self.scale[rows], None if self.zero is None else self.zero[rows])

    def __call__(self, values: Float[Tensor, "rows in"], rows: slice) -> Float[Tensor, "rows in"]:
        zero = None if self.zero is None else self.zero[rows]
        return self.grid.decode(self.encode(values, rows), self.scale[rows], zero).to(values.dtype)

    def urgency(self, values: Tensor, rounded: Tensor, rows: slice) -> Float[Tensor, "rows in"]:
        """2 for pruned weights, 1 for values more than half a mean step beyond the ends of the grid, otherwise 0."""
        urgent = ((values > self.high[rows]) | (values < self.low[rows])).to(values.dtype)
        return urgent if self.mask is None else urgent.masked_fill_(~self.mask[rows], 2)
