"""Wanda: prune by weight times input norm, without an update of the kept weights (Sun 2023)."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from compress.numerics.sparse.scores import wanda
from compress.passes.contract.observers import InputNorm, Observer
from compress.passes.families.pruning import PruningPass


class Wanda(PruningPass):
    """Remove the weights with the smallest product of magnitude and input norm.

    Zero the weights with the smallest |W_ij| * ||X_j||_2, in each row ('row'), in the matrix ('layer'), or N:M.
    """

    use_for: ClassVar[str] = "Half of the weights zero in a minute, and the first step of a chain at 20 to 30%."
    not_for: ClassVar[str] = "2:4 and more than half, where sparsegpt loses far less."
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.11695"
    observes: ClassVar[type[Observer]] = InputNorm

    def score(self, weight: Float[Tensor, "out in"], statistics: InputNorm) -> Float[Tensor, "out in"]:
        return wanda(weight, statistics.norm)
