"""GOBO: a dictionary of a few values per layer, and outliers apart (Zadeh 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.layers.parts.codebook import CodebookScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.kmeans import Lloyd, assign
from compress.passes.contract.facts import Effects, Fact
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Nothing
from compress.passes.contract.passes import LayerPass
from compress.passes.families.codebooks import Outliers, look_up, with_outliers


class GOBO(LayerPass):
    """Store each weight as an index into one dictionary of its layer; outliers stay in floating point.

    The weights of a layer are nearly Gaussian. Those with the least log-probability are outliers. The dictionary starts
    with the means of equal shares of the other weights, and moves by k-means until the sum of the absolute errors no
    longer falls. That is a few steps before the least squared error.
    """

    use_for: ClassVar[str] = "3 to 5 bits without calibration text and without scales. It was made for encoders."
    not_for: ClassVar[str] = "Language models at 4 bits and fewer: gptq with scales per group loses far less."
    paper: ClassVar[str] = "https://arxiv.org/abs/2005.03842"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    bits: int = Field(default=3, ge=1, le=8, description="bits of an index; the dictionary has 2^bits values")
    outliers: float = Field(
        default=0.001,
        ge=0,
        lt=1,
        description="fraction of the weights that stay floats; about that of the paper's threshold of the "
        "log-probability, -4",
    )
    outlier_dtype: Literal["float32", "float16", "bfloat16"] = Field(default="float32", description="dtype of outliers")
    stop: Literal["l1", "l2"] = Field(
        default="l1", description="error that ends the iteration when it no longer falls; l2: plain k-means"
    )

    def effects(self, layer: LayerScheme) -> Effects:
        scheme = with_outliers(layer, CodebookScheme(self.bits, per="tensor"), self._kept)
        return replace(super().effects(layer), scheme=scheme)

    @property
    def _kept(self) -> Outliers:
        return Outliers(self.outliers, self.outlier_dtype)

    def memory(self, size: ProblemSize) -> int:
        return 8 * 8 * size.shape[0] * size.shape[1]  # sorted in float64 with order and running sums

    def solve(self, weight: Float[Tensor, "out in"], statistics: Nothing, layer: Layer) -> Solution:
        weight = weight.float()
        center = weight.mean() if layer.mask is None else weight[layer.mask].mean()
        # a Gaussian's log-probability falls with the distance from its mean, so the order is that of |w - mean|
        chosen = self._kept.choose((weight - center).abs(), layer.mask)
        used = ~chosen if layer.mask is None else layer.mask & ~chosen
        values = weight[used][None]
        count = 2**self.bits - (layer.mask is not None)
        lloyd = Lloyd(values, torch.ones_like(values))
        centers = lloyd.equal_mass(count)
        least = self._error(values, centers)
        for moved in lloyd.steps(centers):
            error = self._error(values, moved)
            if error > least:
                break
            centers, least = moved, error
        return Solution(look_up(weight, centers, layer, chosen, self.outlier_dtype))

    def _error(self, values: Tensor, centers: Tensor) -> float:
        errors = values - centers.gather(1, assign(values, centers))
        return float(errors.abs().sum() if self.stop == "l1" else errors.square().sum())
