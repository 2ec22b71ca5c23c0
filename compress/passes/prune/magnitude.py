"""Magnitude: prune the smallest weights, without data. The baseline of pruning (Han 2015)."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.numerics.sparse.masks import Pattern
from compress.passes.contract.observers import Nothing
from compress.passes.families.pruning import PruningPass


class Magnitude(PruningPass):
    """Remove the weights with the smallest magnitude; needs no calibration text.

    Weights are compared by |W_ij| in each layer ('layer'), in each row, in groups of M, or by blocks. With allocate:
    global, they are compared against one threshold for the whole model.
    """

    use_for: ClassVar[str] = "A baseline, and up to 20 or 30% of zeros without calibration text."
    not_for: ClassVar[str] = "Half of the weights or 2:4: wanda and sparsegpt read some text and lose far less."
    paper: ClassVar[str] = "https://arxiv.org/abs/1506.02626"

    pattern: Pattern = Field(default=Pattern("layer"), description=PruningPass.model_fields["pattern"].description)

    def score(self, weight: Float[Tensor, "out in"], statistics: Nothing) -> Float[Tensor, "out in"]:
        return weight.abs()
