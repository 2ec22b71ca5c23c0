"""Pruning passes: their common options, and the masks that scores give."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from jaxtyping import Float
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from compress.layers.scheme import LayerScheme
from compress.numerics.repair import BLOCK, STEPS, repaired_in_mask, repaired_in_mask_bytes
from compress.numerics.sparse.masks import Pattern
from compress.numerics.sparse.positions import LARGEST_M, SparseLayout
from compress.passes.contract.facts import Effects, Fact, RequiredSparsity
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram, Nothing, Observer
from compress.passes.contract.passes import Survey
from compress.passes.families.allocation import Allocation, Uniform, read_allocation
from compress.passes.families.compensation import CompensatingPass
from compress.roofline.work import Work

REPAIR = 3  # rounds at most: more fit the calibration text only (eval/LOG.md), and each takes as long as a sweep
LEAST_GAIN = 0.01  # of the error of the layer, by each round but the last


class Pruning(BaseModel):
    """The sparsity and the pattern of a pass; a mixin for all passes that prune, once or during training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"masked"})

    sparsity: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="fraction of weights to remove; default 0.5; an N:M pattern fixes it",
    )
    pattern: Pattern = Field(
        default=Pattern("row"),
        description="pattern of the zeros: 'row', 'layer', 'N:M' such as '2:4', or blocks of 'RxC' such as 4x1",
    )

    allocate: Annotated[Allocation, BeforeValidator(read_allocation)] = Field(
        default=Uniform(),
        description="distribution of the sparsity over layers: uniform, global (one threshold), owl, sensitivity; "
        "with options: {owl: {M: 5, lambda: 0.08}}",
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.pattern.n_of_m is None:
            return
        n, m = self.pattern.n_of_m
        if self.sparsity is not None and abs(self.sparsity - (1 - n / m)) > 1e-9:
            raise ValueError(f"pattern {self.pattern.text} fixes sparsity {1 - n / m:g}; leave sparsity out")
        if not isinstance(self.allocate, Uniform):
            raise ValueError(
                f"allocate: {self.allocate.key} needs different sparsities per layer, but pattern {self.pattern.text} "
                "fixes the sparsity; use pattern: row or layer, or leave allocate out"
            )

    @property
    def density(self) -> float:
        """The fraction of weights that is kept."""
        return 1 - self.target_sparsity

    @property
    def target_sparsity(self) -> float:
        """The fraction of weights that is removed, over all layers."""
        if self.pattern.n_of_m is not None:
            return 1 - self.pattern.n_of_m[0] / self.pattern.n_of_m[1]
        return 0.5 if self.sparsity is None else self.sparsity

    def effects(self, layer: LayerScheme) -> Effects:
        """Add the zeros of the layer, and the reason why the pattern does not fit it."""
        effects: Effects = super().effects(layer)  # type: ignore[misc]
        return replace(
            effects,
            problem=self.pattern.refuses(layer.shape, self.density),
            sparsities=self._sparsities(layer.shape),
            zeros=self.zeros(layer.shape),
        )

    def _sparsities(self, shape: tuple[int, int]) -> tuple[SparseLayout, ...]:
        """Return the possible storage schemes of the mask, if no other pass prunes the layer."""
        rows, width = shape
        if self.pattern.n_of_m is not None:
            n, m = self.pattern.n_of_m
            regular = SparseLayout.regular(shape, n, m)
            return (*([regular] if m <= min(width, LARGEST_M) else []), SparseLayout(regular.kept))
        kept_count = rows * width - round(self.zeros(shape).expected_sparsity * rows * width)
        is_one_group = self.pattern.text == "row" and 0 < kept_count // rows < width <= LARGEST_M
        return (
            *([SparseLayout.regular(shape, kept_count // rows, width)] if is_one_group else []),
            SparseLayout(kept_count),
        )

    def zeros(self, shape: tuple[int, int], sparsity: float | None = None) -> RequiredSparsity:
        """Return the sparsity due in a layer of this shape, at the given sparsity or at that of the pass."""
        sparsity = self.target_sparsity if sparsity is None else sparsity
        return RequiredSparsity(sparsity, self.pattern.removed(shape, 1 - sparsity) / (shape[0] * shape[1]))

    def prune(self, weight: Float[Tensor, "out in"], statistics: Any, layer: Layer, sparsity: float) -> Solution:
        """Prune the layer to a sparsity; weights that earlier passes removed stay zero and count."""
        keep = self.pattern.keep(self.ranks(weight, statistics, layer), 1 - sparsity)
        keep = keep if layer.mask is None else keep & layer.mask
        return Solution(
            weight.masked_fill(~keep, 0), keep, zeros=self.zeros((weight.shape[0], weight.shape[1]), sparsity)
        )

    def ranks(self, weight: Float[Tensor, "out in"], statistics: Any, layer: Layer) -> Float[Tensor, "out in"]:
        """Return the scores, -1 for removed weights; magnitudes, with a journal entry, if all scores are zero."""
        score = self.score(weight, statistics)
        if not bool(score.any()):
            layer.log("fallback", "all scores are zero; magnitudes are used instead")
            score = weight.abs()
        return score if layer.mask is None else score.masked_fill(~layer.mask, -1)

    @abstractmethod
    def score(self, weight: Float[Tensor, "out in"], statistics: Any) -> Float[Tensor, "out in"]:
        """Return the scores of all weights, at least 0; the weights with the smallest scores are removed."""


class PruningPass(Pruning, CompensatingPass):
    """A pass that prunes one layer at a time."""

    normalizes: ClassVar[bool] = False  # sparsegpt loses by it (eval/LOG.md)

    true_sequential: bool = Field(
        default=False,
        description="calibrate each layer on the output of the compressed layers before it in the block; false: "
        "compute scores on the original block, as in the papers",
    )
    repair: int | None = Field(
        default=None,
        ge=0,
        description="rounds over the columns that fit the kept weights to the layer's output before pruning; 0: kept "
        "weights stay as the pruning leaves them, as in the papers; default: until a round lowers the error of the "
        f"layer by less than {LEAST_GAIN:.0%}, at most {REPAIR}, in passes that read the calibration text, otherwise 0",
    )

    def without_effect(self) -> dict[str, str]:
        names = () if self.compensates else ("damping", "shrinkage", "error", "normalize_tokens")
        return super().without_effect() | dict.fromkeys(names, "with repair: 0; add repair: 3, or leave it out")

    @property
    def repair_rounds(self) -> int:
        """The largest number of rounds of the repair."""
        if self.repair is not None:
            return self.repair
        return 0 if self.observes is Nothing else REPAIR

    @property
    def compensates(self) -> bool:
        """Whether kept weights change, so that the Hessian of the inputs is needed."""
        return self.repair_rounds > 0 or issubclass(self.observes, Gram)

    @property
    def observer(self) -> type[Observer]:
        return self.hessian if self.compensates else self.observes

    def memory(self, size: ProblemSize) -> int:
        size_bytes = super().memory(size)
        repair = size.cast_bytes + repaired_in_mask_bytes(*size.shape)
        return max(size_bytes, repair) if self.repair_rounds else size_bytes

    def shared_work(self, width: int) -> Work:
        # no factor without a sweep or an asymmetric error
        factored = issubclass(self.observes, Gram) or self.error == "asymmetric"
        return super().shared_work(width) if factored and self.compensates else Work()

    def work(self, shape: tuple[int, int]) -> Work | None:
        weights, width = shape[0] * shape[1], shape[1]
        rounds = self.repair_rounds
        # W - V times H, and products of a block with itself in each step of conjugate gradients
        updates = 2 * weights * width + STEPS * 2 * BLOCK * weights
        repair = Work(updates=updates, elements=(8 + 10 * STEPS) * weights) * rounds
        hessian = Work(elements=8 * width**2) if rounds else Work()
        fitted = self.fitted_work(shape) if self.compensates else Work()
        return Work(scores=weights) + fitted + repair + hessian

    def survey(self) -> Survey | None:
        return self.allocate.survey(self)

    def solve(self, weight: Float[Tensor, "out in"], statistics: Any, layer: Layer) -> Solution:
        rows, width = self.pattern.whole((weight.shape[0], weight.shape[1]))
        if (rows, width) != weight.shape:
            message = (
                f"pattern {self.pattern.text} fits the first {rows} rows and {width} columns; the rest stays dense"
            )
            layer.log("note", message, dense=weight.numel() - rows * width)
        sparsity = self.target_sparsity if layer.allocated is None else float(layer.allocated)
        if sparsity >= 1:
            layer.log("fallback", "the allocation removes all weights of this layer")
        weight = self.fitted(weight, statistics)
        return self.repaired(weight, self.prune(weight, statistics, layer, sparsity), statistics)

    def repaired(self, weight: Float[Tensor, "out in"], pruned: Solution, statistics: Any) -> Solution:
        """Return the solution with the kept weights fitted to the output of `weight`; codes stay."""
        rounds = self.repair_rounds
        if not rounds or not isinstance(pruned.weight, Tensor):
            return pruned
        assert pruned.mask is not None, "a pass that prunes gives a mask"
        least_gain = LEAST_GAIN if self.repair is None else 0.0
        hessian = statistics.shrunk(self.regularization)
        fitted_weight = repaired_in_mask(
            weight.float(), pruned.weight, pruned.mask, hessian, self.damping, rounds, least_gain
        )
        return replace(pruned, weight=fitted_weight)
