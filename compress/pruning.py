"""What pruning passes have in common: their options, under the same names, and how scores become masks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from compress.contract import Layer, LayerPass, Solution
from compress.numerics.masks import Pattern
from compress.types import Fact


class PruningPass(LayerPass):
    """Options that every pruning pass has, under the same names."""

    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"masked"})

    sparsity: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of weights to remove; 0.5 if not given; N:M patterns have their own",
    )
    pattern: Pattern = Field(
        default=Pattern("row"), description="where zeros may stand: 'row', 'layer', or 'N:M' such as '2:4'"
    )
    allocate: Literal["uniform"] = Field(default="uniform", description="how sparsity is shared out over layers")

    def model_post_init(self, context: Any) -> None:
        if self.pattern.n_of_m is not None and self.sparsity is not None:
            n, m = self.pattern.n_of_m
            if abs(self.sparsity - (1 - n / m)) > 1e-9:
                raise ValueError(f"pattern {self.pattern.text} has sparsity {1 - n / m:g}; leave sparsity out")

    @property
    def density(self) -> float:
        """The share of weights that is kept."""
        if self.pattern.n_of_m is not None:
            return self.pattern.n_of_m[0] / self.pattern.n_of_m[1]
        return 1 - (0.5 if self.sparsity is None else self.sparsity)

    def solve(self, weight: Float[Tensor, "out in"], seen: Any, layer: Layer) -> Solution:
        score = self.score(weight, seen)
        if layer.mask is not None:
            score = score.masked_fill(~layer.mask, -1)  # what is pruned already goes first
        keep = self.pattern.keep(score, self.density)
        keep = keep if layer.mask is None else keep & layer.mask
        return Solution(weight * keep, keep)

    @abstractmethod
    def score(self, weight: Float[Tensor, "out in"], seen: Any) -> Float[Tensor, "out in"]:
        """How much each weight matters, at least 0; the least are removed."""
