"""Round to nearest: every weight to the nearest value of the grid, without data. The baseline of quantization."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from compress.api.observers import Nothing
from compress.api.passes import Layer
from compress.families.quantizing import QuantizingPass
from compress.numerics.quant.codes import Codes


class RTN(QuantizingPass):
    """Round each weight to the nearest value of the grid; needs no calibration data."""

    paper: ClassVar[str] = "https://arxiv.org/abs/1712.05877"  # Jacob 2018, section 2.1

    def codes(self, weight: Float[Tensor, "out in"], seen: Nothing, layer: Layer) -> Codes:
        return self.nearest(weight, layer)
