"""ALPS: choose the zeros by operator splitting, then fit the kept weights (Meng 2024)."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from compress.numerics.sparse.operator_splitting import split_mask, split_mask_bytes
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram, Observer
from compress.passes.contract.passes import LayerPass
from compress.passes.families.pruning import PruningPass


class ALPS(PruningPass):
    """Choose the zeros of a whole layer at once by ADMM, and fit the kept weights to the layer's output.

    Minimize ||W X - Q X||^2 by the alternating direction method of multipliers (ADMM). One copy of the weight fits the
    output, the other has the zeros of the pattern. A growing penalty draws the copies together until no zero moves.

    sparsegpt chooses the zeros of 128 columns at a time, and never moves them afterwards. At the end `repair` fits the
    kept weights, the second step of the paper.
    """

    use_for: ClassVar[str] = (
        "2:4, and half of the weights zero or more. It loses less than sparsegpt and takes more time."
    )
    not_for: ClassVar[str] = "A first trial: on layers 4096 wide it takes about ten times as long as sparsegpt."
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.07831"
    observes: ClassVar[type[Observer]] = Gram

    true_sequential: bool = Field(default=True, description=LayerPass.model_fields["true_sequential"].description)

    def memory(self, size: ProblemSize) -> int:
        return max(super().memory(size), split_mask_bytes(*size.shape))

    def work(self, shape: tuple[int, int]) -> None:
        return None  # the steps until no zero moves depend on the layer

    def score(self, weight: Float[Tensor, "out in"], statistics: Gram) -> Float[Tensor, "out in"]:
        return weight.square() * statistics.diagonal  # of the first iteration

    def prune(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer, sparsity: float) -> Solution:
        def keep(score: Float[Tensor, "out in"]) -> Bool[Tensor, "out in"]:
            if layer.mask is None:
                return self.pattern.keep(score, 1 - sparsity)
            return self.pattern.keep(score.masked_fill(~layer.mask, -1), 1 - sparsity) & layer.mask

        if not bool(statistics.diagonal.any()):
            return super().prune(weight, statistics, layer, sparsity)
        pruned, mask, iterations = split_mask(
            weight.float(), statistics.shrunk(self.regularization), keep, self.damping
        )
        layer.log("note", "operator splitting", iterations=iterations)
        return Solution(pruned, mask, zeros=self.zeros((weight.shape[0], weight.shape[1]), sparsity))
