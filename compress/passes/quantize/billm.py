"""BiLLM: two binary planes; salient columns and the others of a block have scales of their own (Huang 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.column_sweep import sweep
from compress.numerics.quant.codes import Codes, groups_in, store
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.planes import nearest_signs, residual_error, residual_scales, split_errors, split_scales
from compress.numerics.quant.refine_planes import planes_bytes, refined_planes
from compress.numerics.quant.rounding import rounding_bytes
from compress.numerics.quant.scales import positive
from compress.passes.contract.facts import Effects, Fact
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.families.compensation import CompensatingPass

BINARY = GRIDS["binary"]
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 50, 64, 96, 128)
"""Numbers of salient columns that are tried; the paper tries each one up to 50."""


class BiLLM(CompensatingPass):
    """Store a weight as two binary planes, whose scales differ between the salient columns of a block and the others.

    In each block the columns with the largest sum of w^2 / [U_jj]^2 are salient. Their number is the one with the least
    squared error of the block (section 3.2); this error includes that of the other columns.

    - Salient columns are binarized, and what is left of them is binarized again.
    - The other weights are binarized in two sets, of small and of large magnitude, each with its own scale. The break
      point between the sets has the least error (section 3.3), here for each row.

    The sweep of GPTQ compensates each column's error in all later columns; the paper compensates it in later blocks
    only. `refine` then improves scales and signs of both planes.

    Size: both kinds are sums of two planes, +-a +-b. A layer has 2 bits per weight for the signs, 0.5 bits for its
    scales (two for each of two sets in 128 columns), and 64 bits per column for their sets. The 1.08 bits of the paper
    count neither the scales nor which weights are large.
    """

    use_for: ClassVar[str] = "About 2.5 bits per weight with learned scales: follow it by distill, as the recipe does."
    not_for: ClassVar[str] = "One bit: more than 2.5 bits are stored, and quip_sharp and qtip lose far less with 2."
    paper: ClassVar[str] = "https://arxiv.org/abs/2402.04291"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "masked"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    block_size: int = Field(
        default=128,
        ge=8,
        multiple_of=2,
        description="columns of a block; its salient columns share scales, and so do its others",
    )
    most_salient: int = Field(default=50, ge=1, description="the largest number of salient columns in a block")
    refine: int = Field(
        default=4,
        ge=0,
        le=100,
        description="rounds after the sweep: scales of both planes by least squares given the signs, then the signs of "
        "each weight again given all others; 0: as in the paper",
    )

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.most_salient >= self.block_size:
            raise ValueError(
                f"most_salient {self.most_salient} leaves no other column in a block of {self.block_size}; write a "
                "smaller number"
            )

    @property
    def group_size(self) -> int:
        """Half of a block: the number of columns of a group if both groups of a block had equally many."""
        return self.block_size // 2

    def effects(self, layer: LayerScheme) -> Effects:
        plane = CodesScheme(BINARY, self.group_size, indexed=True)
        return replace(super().effects(layer), scheme=layer.with_parts(plane, plane))

    def memory(self, size: ProblemSize) -> int:
        return super().memory(size) + planes_bytes(*size.shape, 2) + rounding_bytes(*size.shape)

    def solve(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> Solution:
        factor = statistics.factor_of(layer.name, layer.log, self.regularization)
        weight = self.fitted(weight.float(), statistics)
        rule = _TwoPlanes(self, weight, factor.diagonal(), layer.storage)
        sweep(weight, factor, rule)
        planes = rule.planes
        if self.refine:
            planes = refined_planes(weight, planes, statistics.damped(self.regularization), self.refine, layer.storage)
        return Solution([CodesPart.of(plane) for plane in planes])

    def salient_columns(self, values: Float[Tensor, "out size"], pivots: Float[Tensor, " size"]) -> Int[Tensor, " n"]:
        """Return the salient columns of a block.

        Args:
            pivots: U_jj of its columns.
        """
        order = (values.square().sum(0) / pivots.square()).argsort(descending=True, stable=True)
        most = min(self.most_salient, values.shape[1] - 1)
        counts = [count for count in COUNTS if count <= most]
        errors = [
            residual_error(values[:, order[:count]]).sum() + other_error.sum()
            for count, other_error in zip(counts, split_errors(values, order, counts), strict=True)
        ]
        return order[: counts[int(torch.stack(errors).argmin())]]


class _TwoPlanes:
    """The column rule: find salient columns and the scales of a block when the sweep reaches it, then round to them."""

    def __init__(
        self, step: BiLLM, weight: Float[Tensor, "out in"], pivots: Float[Tensor, " in"], dtype: torch.dtype
    ) -> None:
        self.step, self.pivots, self.dtype, self.width = step, pivots, dtype, weight.shape[1]
        groups = groups_in(self.width, step.group_size)
        self.index = torch.zeros(self.width, dtype=torch.int32, device=weight.device)
        self._scales = weight.new_zeros(2, len(weight), groups)
        self._signs: list[tuple[Tensor, Tensor]] = []

    def starts(self, width: int) -> Sequence[int]:
        return range(0, width, self.step.block_size)

    def open(self, column: int, remaining: Float[Tensor, "rest out"]) -> None:
        step, values = self.step, remaining[: self.step.block_size].T.contiguous()
        columns, size = slice(column, column + values.shape[1]), values.shape[1]
        is_other, group = torch.ones(size, dtype=torch.bool, device=values.device), 2 * (column // step.block_size)
        if size > step.group_size:  # a last block of at most half the size is one group
            salient = step.salient_columns(values, self.pivots[columns])
            is_other[salient] = False
            self._fit(group + 1, residual_scales(values[:, salient]))
        self._fit(group, split_scales(values[:, is_other]))
        self.index[columns] = group + (~is_other).to(torch.int32)

    def _fit(self, group: int, scales: tuple[Tensor, Tensor]) -> None:
        for plane_scales, scale in zip(self._scales, scales, strict=True):
            plane_scales[:, group] = positive(scale, self.dtype)

    def compress(self, column: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        a, b = self._scales[:, :, int(self.index[column])]
        signs = nearest_signs(values, a, b)
        self._signs.append(signs)
        return signs[0] * a + signs[1] * b

    @property
    def planes(self) -> list[Codes]:
        """The codes of both planes."""
        parts = []
        for signs, scale in zip(zip(*self._signs, strict=True), self._scales, strict=True):
            codes = store(torch.stack(signs, dim=1) > 0, BINARY)
            parts.append(Codes(codes, scale, None, BINARY, self.step.group_size, self.index.clone()))
        return parts
