"""What a layer does to its inputs before it multiplies them: rounding to a grid, with columns that are spared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from compress.numerics.quant.grids import Grid


@dataclass(frozen=True, eq=False)
class InputRounding:
    """Rounding of inputs to a grid; what it returns is what the codes stand for, in the dtype of the inputs.

    scale: [1], found in calibration, for all tokens; None: one per token, found when the layer runs (ZeroQuant, Yao
    2022, section 3.2). threshold: input columns in which any magnitude of the call reaches it are left as they are;
    columns: [in], True for columns that are always left as they are (LLM.int8, Dettmers 2022, section 3.2). With
    either of them, x W^T is the sum of a product in integers and one in floats over the spared columns. symmetric:
    false finds a zero point with the scale of each token.
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
        """The columns of this call that are not rounded, None where none ever is."""
        found = self.columns
        if self.threshold is not None:
            large = (x.abs() >= self.threshold).reshape(-1, x.shape[-1]).any(0)
            found = large if found is None else found | large
        return found
