"""Quantization of a layer's inputs before the matrix product, with outlier columns kept in float."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.numerics.quant.grids import Grid


@dataclass(frozen=True, eq=False)
class InputRounding:
    """Fake quantization of inputs: round to a grid and dequantize, in the dtype of the inputs.

    scale: [1], fitted in calibration, for all tokens; None: one per token, computed in each call (ZeroQuant, Yao 2022,
    section 3.2). threshold: an input column is not rounded in a call where any of its magnitudes reaches the threshold.
    columns: [in], True for columns that are never rounded (LLM.int8, Dettmers 2022, section 3.2). With either of them,
    x W^T is the sum of an integer product and a float product over the columns that are not rounded. symmetric: False
    computes a zero point with the scale of each token.
    """

    grid: Grid
    scale: Float[Tensor, " 1"] | None = None
    threshold: float | None = None
    columns: Bool[Tensor, " in"] | None = None
    symmetric: bool = True

    def __call__(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        spared = self.spared(x)
        inside = x if spared is None else x.masked_fill(spared, 0)
        zero = None
        if self.scale is None:
            low, high = torch.aminmax(inside, dim=-1, keepdim=True)
            scale, zero = self.grid.fit(low, high, self.symmetric, x.dtype)
        else:
            scale = self.scale.to(x.dtype)
        rounded = self.grid.decode(self.grid.encode(inside, scale, zero), scale, zero)
        return rounded if spared is None else torch.where(spared, x, rounded)

    def spared(self, x: Float[Tensor, "*batch in"]) -> Bool[Tensor, " in"] | None:
        """The columns that are not rounded in this call, or None when the rounding has no such columns."""
        columns = self.columns
        if self.threshold is not None:
            large = (x.abs() >= self.threshold).reshape(-1, x.shape[-1]).any(0)
            columns = large if columns is None else columns | large
        return columns
