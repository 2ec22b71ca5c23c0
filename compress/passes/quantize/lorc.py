"""LoRC: add a low-rank product to a quantized weight to compensate its error (Yao 2023)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.errors import NumericError
from compress.layers.base import PartScheme, WeightPart
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.parts.dense import DensePart, DenseScheme
from compress.layers.parts.low_rank import LowRankPart, LowRankScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.dtypes import DTYPES
from compress.numerics.linalg import factor_bytes
from compress.numerics.low_rank import refitted, truncated_svd, weighted_svd
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.facts import Effects, Fact, Requirements
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram, Nothing, Observer
from compress.passes.contract.passes import LayerPass
from compress.passes.families.compensation import Regularized
from compress.passes.families.weight_grid import GridName

RANK = 16


class LoRC(Regularized, LayerPass):
    """Add a low-rank correction of the rounding error to layers that an earlier pass quantized.

    Add B A of a given rank to a quantized weight Q, to approximate the rounding error E = W - Q; codes stay fixed. The
    pass must follow the quantizing pass in the same sweep.

    error: 'weight' minimizes ||E - B A||^2 as in the paper (section 4). 'activation' minimizes ||(E - B A) X||^2 on the
    calibration inputs X, as EoRA and LQER do.

    The matrices are stored as floats, or as codes with a scale per row. With codes, A is rounded first and B is fitted
    to the rounded A.
    """

    use_for: ClassVar[str] = (
        "3 and 2 bits with half a bit to spare: a low-rank product repairs more of the rounding error than smaller "
        "groups do."
    )
    not_for: ClassVar[str] = "4 bits and more, where the product costs more than it repairs. Formats other than native."
    paper: ClassVar[str] = "https://arxiv.org/abs/2303.08302"
    after: ClassVar[frozenset[Fact]] = frozenset({"quantized"})
    never_after: ClassVar[frozenset[Fact]] = frozenset({"masked"})
    observes: ClassVar[type[Observer]] = Gram

    rank: int = Field(
        default=RANK, ge=1, description="rank of the product, which stores rank * (inputs + outputs) numbers"
    )
    factors: GridName | Literal["float16", "bfloat16", "float32"] = Field(
        default="int8",
        description="storage of both matrices: a number grid with a scale per row, or a float dtype",
    )
    error: Literal["weight", "activation"] = Field(
        default="activation", description="error to minimize: of the weight, or of the layer's output"
    )

    def without_effect(self) -> dict[str, str]:
        idle = ("damping", "shrinkage") if self.error == "weight" else ()
        return super().without_effect() | dict.fromkeys(
            idle, "with error: weight; leave it out, or use error: activation"
        )

    @property
    def observer(self) -> type[Observer]:
        return Gram if self.error == "activation" else Nothing

    @property
    def requires(self) -> Requirements:
        return replace(super().requires, unquantized=True)

    def effects(self, layer: LayerScheme) -> Effects:
        part = LowRankScheme(self.rank, self._stored, self._stored)
        return replace(super().effects(layer), scheme=layer.with_parts(*layer.parts, part))

    @property
    def _stored(self) -> PartScheme:
        if self.factors in DTYPES:
            return DenseScheme(self.factors)
        return CodesScheme(GRIDS[self.factors], GRIDS[self.factors].group_size or "channel")

    def memory(self, size: ProblemSize) -> int:
        rows, width = size.shape
        return super().memory(size) + max(factor_bytes(width), 8 * (4 * rows * width + width**2))

    def solve(self, weight: Float[Tensor, "out in"], statistics: Any, layer: Layer) -> Solution:
        if layer.unquantized is None:
            raise NumericError(
                f"{layer.name}: the weight before rounding is not known; quantize the layer in the same sweep"
            )
        error, factor = (layer.unquantized - weight).float(), None
        if self.error == "activation":
            factor = statistics.factor_of(layer.name, layer.log, self.regularization)
            error = error * (statistics.diagonal != 0)  # a channel that is always zero adds no error
        b, a = truncated_svd(error, self.rank) if factor is None else weighted_svd(error, factor, self.rank)
        down = self._part(a, layer)
        if down.scheme.quantized:
            b = refitted(error, down.dense(a.dtype), factor)
        return Solution(added=(LowRankPart.of(down, self._part(b, layer)),))

    def _part(self, matrix: Float[Tensor, "rows columns"], layer: Layer) -> WeightPart:
        """One of the matrices in its storage form."""
        if self.factors in DTYPES:
            return DensePart.of(matrix, self.factors)
        grid = GRIDS[self.factors]
        return CodesPart.of(quantize(matrix, grid, grid.group_size or "channel", dtype=layer.storage))
