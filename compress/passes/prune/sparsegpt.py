"""SparseGPT: prune column by column; later columns compensate the error (Frantar 2023)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from compress.layers.parts.codes import CodesScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.codes import GroupSize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.rounding import GridOptions, Rounding, rounding_bytes
from compress.numerics.sparse.masks import Pattern
from compress.numerics.sparse.sparsifying import Sparsifying, order_by
from compress.passes.contract.facts import Effects, Fact, RequiredSparsity
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram, Observer
from compress.passes.contract.passes import LayerPass
from compress.passes.families.pruning import PruningPass
from compress.passes.families.quantizing import ScaleOption
from compress.passes.families.weight_grid import GridName, GroupSizeOption, check_grid

PRUNE_BLOCK = 128  # SparseGPT, section 3.3: columns whose zeros are chosen at once
GROUP_SIZE = 64  # as in the quantizing passes


class SparseGPT(PruningPass):
    """Prune the columns of a weight one after the other; the remaining weights compensate the removed ones.

    Minimize ||W X - Q X||^2 greedily over columns: remove the weights with the least w^2 / [U_jj]^2. Later columns
    compensate the error.

    With `weights`, the kept weights are rounded to that grid in the same sweep, so later columns compensate both errors
    (section 3.5). The scale of a group is fitted to its kept weights.

    act_order: 'static' sweeps columns with large inputs first, with the columns of an N:M group or block together. The
    groups of the scales are those of the original order.
    """

    use_for: ClassVar[str] = (
        "Half of the weights zero, and 2:4, in minutes. To quantize the others too, add gptq after it; `weights` "
        "rounds them in the same sweep, as in the paper, and loses more."
    )
    not_for: ClassVar[str] = (
        "The least loss, where alps is better in more time. Speed in programs without sparse kernels, which store and"
        " multiply zeros like other weights."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2301.00774"
    observes: ClassVar[type[Observer]] = Gram

    pattern: Pattern = Field(
        default=Pattern("row"),
        description="pattern of the zeros in each block of columns: 'row', 'layer' (any), 'N:M', or blocks of 'RxC'",
    )
    true_sequential: bool = Field(default=True, description=LayerPass.model_fields["true_sequential"].description)
    prune_block: int | None = Field(
        default=None, gt=0, description=f"columns whose zeros are chosen at once; default {PRUNE_BLOCK}; N:M: always M"
    )
    act_order: Literal["none", "static"] = Field(
        default="none", description="order of pruning: 'none': left to right; 'static': columns with large inputs first"
    )
    weights: GridName | None = Field(
        default=None,
        description=f"grid of the kept weights, rounded in the same sweep: {', '.join(GRIDS)}; null: no rounding",
    )
    group_size: GroupSizeOption | None = Field(
        default=None, description=f"with weights: columns that share a scale, channel or tensor; default {GROUP_SIZE}"
    )
    symmetric: bool = Field(default=True, description="with weights: no zero point; false: one zero point per scale")
    scale: ScaleOption = Field(default="absmax", description="with weights: scale search, as for gptq")

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self._check_columns()
        if self.scale == "importance":
            raise ValueError("scale: importance is not supported by this pass; use scale: mse")
        if self.weights is not None:
            check_grid(self.weights, self.groups, self.symmetric)
            if not GRIDS[self.weights].has_zero:
                raise ValueError(f"weights: {self.weights} has no zero, which pruned weights need; use another grid")

    def without_effect(self) -> dict[str, str]:
        reason = "without rounding; add weights: int4, or leave it out"
        idle = dict.fromkeys(("group_size", "symmetric", "scale"), reason)
        if self.weights is not None:
            idle = {"repair": "with weights: the sweep compensates kept weights as it rounds them; leave it out"}
        return super().without_effect() | idle

    def _check_columns(self) -> None:
        span, groups = self.pattern.span, self.groups
        if self.prune_block is not None and self.pattern.n_of_m is not None:
            raise ValueError(
                f"prune_block has no effect with pattern {self.pattern.text}, which chooses the zeros of {span} columns"
            )
        if self.block % span and self.pattern.n_of_m is None:
            raise ValueError(f"prune_block {self.block} is not a multiple of the {span} columns of {self.pattern.text}")
        if self.weights is not None and isinstance(groups, int) and groups % span:
            raise ValueError(
                f"group_size {groups} is not a multiple of the {span} columns of pattern {self.pattern.text}"
            )

    @property
    def block(self) -> int:
        """The number of columns whose zeros are chosen at once."""
        return PRUNE_BLOCK if self.prune_block is None else self.prune_block

    @property
    def groups(self) -> GroupSize:
        """The effective group size."""
        if self.group_size is not None:
            return self.group_size
        return (GRIDS[self.weights].group_size if self.weights is not None else None) or GROUP_SIZE

    def effects(self, layer: LayerScheme) -> Effects:
        effects = super().effects(layer)
        if self.weights is None:
            return effects
        quantized: frozenset[Fact] = frozenset({"quantized"})
        codes = CodesScheme(GRIDS[self.weights], self.groups, self.symmetric)
        return replace(effects, scheme=layer.with_parts(codes), facts=effects.facts | quantized)

    def memory(self, size: ProblemSize) -> int:
        pruning = 5 * size.weights + rounding_bytes(*size.shape)  # the scores in float32, and the mask
        return max(super().memory(size), size.cast_bytes + pruning)

    def work(self, shape: tuple[int, int]) -> Any:
        # with rounded weights nothing is repaired
        step = self if self.weights is None else self.model_copy(update={"repair": 0})
        solved = PruningPass.work(step, shape)
        return None if solved is None else solved + self.sweep_work(shape)

    def score(self, weight: Float[Tensor, "out in"], statistics: Gram) -> Float[Tensor, "out in"]:
        # w^2 / [inv(H)]_jj: the error of removing this weight if all others compensate (equation 2)
        return weight.square() / inverse_diagonal(statistics, statistics.factor(self.regularization)[0], None)

    def prune(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer, sparsity: float) -> Solution:
        order = order_by(statistics.diagonal, self.pattern.span) if self.act_order == "static" else None
        factor = statistics.factor_of(layer.name, layer.log, self.regularization, order)
        weight, mask, idle = weight.float(), layer.mask, statistics.diagonal == 0
        rounding = None
        if self.weights is not None:
            score = weight.square() / inverse_diagonal(statistics, factor, order)
            rounding = partial(self._rounding, weight, self._expected_mask(score, mask, sparsity), layer, order)
        if order is not None:
            weight, idle = weight[:, order], idle[order]
            mask = None if mask is None else mask[:, order]
        pivots = factor.diagonal().masked_fill(idle, torch.inf)
        rule = Sparsifying(self.pattern, 1 - sparsity, self.block, pivots, weight.shape[0], mask, rounding)
        pruned = rule(weight, factor)
        if order is not None:
            pruned = pruned[:, order.argsort()]
        solved = pruned if rule.inner is None else rule.inner.codes
        return Solution(solved, rule.kept(order), zeros=self.zeros((weight.shape[0], weight.shape[1]), sparsity))

    def _expected_mask(
        self, score: Float[Tensor, "out in"], mask: Bool[Tensor, "out in"] | None, sparsity: float
    ) -> Bool[Tensor, "out in"] | None:
        """Return an estimate of the final mask, for scales that are fixed before the sweep, or the present mask."""
        if self.act_order == "none" and isinstance(self.groups, int):
            return mask
        score = score if mask is None else score.masked_fill(~mask, -1)
        expected = self.pattern.keep(score, 1 - sparsity)
        return expected if mask is None else expected & mask

    def _rounding(
        self,
        weight: Float[Tensor, "out in"],
        expected: Bool[Tensor, "out in"] | None,
        layer: Layer,
        order: Tensor | None,
        keep: Bool[Tensor, "out in"],
    ) -> Rounding:
        """Return the rule that rounds kept weights, in the order of the sweep; weight and expected: original order."""
        kept_weight = weight if expected is None else weight * expected
        grid = GRIDS[str(self.weights)]
        options = GridOptions(grid, self.groups, self.symmetric, self.scale, layer.storage, layer.shared_absmax)
        rule = Rounding(kept_weight, options, order=order)
        rule.keep = keep.T
        return rule

    def zeros(self, shape: tuple[int, int], sparsity: float | None = None) -> RequiredSparsity:
        rows, width = shape
        sparsity = self.target_sparsity if sparsity is None else sparsity
        if self.pattern.n_of_m is not None:
            return super().zeros(shape, sparsity)
        blocks = [min(self.block, width - start) for start in range(0, width, self.block)]
        removed = sum(self.pattern.removed((rows, block), 1 - sparsity) for block in blocks)
        return RequiredSparsity(sparsity, removed / (rows * width))


def inverse_diagonal(statistics: Gram, factor: Float[Tensor, "in in"], order: Tensor | None) -> Float[Tensor, " in"]:
    """[inv(H)]_jj in the original order of the columns, infinity if the input was always zero.

    Args:
        factor: U in the order of the columns, for which inv(H) = U^T U.
    """
    diagonal = factor.square().sum(0)
    diagonal = diagonal if order is None else diagonal[order.argsort()]
    return diagonal.masked_fill(statistics.diagonal == 0, torch.inf)
