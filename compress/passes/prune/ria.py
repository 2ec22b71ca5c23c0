"""RIA: prune by a weight's importance relative to its row and column, times input norm (Zhang 2024)."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.numerics.sparse.scores import RIA_EXPONENT, ria
from compress.passes.contract.observers import InputNorm, Observer
from compress.passes.families.pruning import PruningPass


class RIA(PruningPass):
    """Remove weights that are small relative to their row and column, weighted by the norm of their input.

    Zero the weights with the smallest (|W_ij| / sum_i |W_ij| + |W_ij| / sum_j |W_ij|) * ||X_j||_2^a. The relative
    importance prevents the removal of whole channels with small weights.
    """

    use_for: ClassVar[str] = "Half of the weights zero on models where wanda removes whole channels."
    not_for: ClassVar[str] = "Small models: wanda was better at 50% and 2:4."
    paper: ClassVar[str] = "https://openreview.net/forum?id=Tr0lPx9woF"
    observes: ClassVar[type[Observer]] = InputNorm

    a: float = Field(default=RIA_EXPONENT, ge=0, description="exponent of the input norm")

    def score(self, weight: Float[Tensor, "out in"], statistics: InputNorm) -> Float[Tensor, "out in"]:
        return ria(weight, statistics.norm, self.a)
