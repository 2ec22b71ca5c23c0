"""PB-LLM: binary weights, but a share of salient weights in 8 bits (Shang 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.parts.sparse import SparsePart, SparseScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.column_sweep import sweep
from compress.numerics.quant.codes import Codes, fit, store
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.refine import refine_bytes, refined_sum
from compress.numerics.quant.rounding import rounding_bytes
from compress.numerics.sparse.positions import PackedMask, SparseLayout
from compress.passes.contract.facts import Effects, Fact
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.families.compensation import CompensatingPass

BINARY = GRIDS["binary"]


class PBLLM(CompensatingPass):
    """Binarize a weight with a scale per group, and add 8-bit codes at the salient weights.

    In each block of `group_size` columns the weights with the largest score are salient. The score is |w|
    (`magnitude`), or w^2 / [U_jj]^2 (`hessian`), the increase of the output's error without the weight (section 3.2).
    The others become sign(w) times their mean magnitude, which is the scale of the least squared error (section 3.4).
    The sweep of GPTQ takes the columns from left to right, and later columns compensate each error (section 3.3).

    Size: a sign for every weight, and for each salient weight the difference from its binary value, as an integer of
    `salient_weights` with a scale per row. The positions of these integers take one bit per weight, which the paper
    does not count. With a tenth of salient weights a layer has 1 + 1 + 0.8 bits per weight, and those of the scales.
    """

    use_for: ClassVar[str] = (
        "Studies of how far binary weights go. Starts for distill, which learns the scales of both parts."
    )
    not_for: ClassVar[str] = (
        "The least loss at its bits: with the positions it has nearly 3, where gptq with int2 or int3 loses far less."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2310.00034"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "masked"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    salient: float = Field(default=0.1, gt=0, lt=0.5, description="fraction of the weights in 8 bits")
    score: Literal["magnitude", "hessian"] = Field(
        default="hessian", description="the weights that are salient: of the largest magnitude, or by the Hessian"
    )
    salient_weights: Literal["int4", "int5", "int6", "int7", "int8"] = Field(
        default="int8", description="grid of the salient weights"
    )
    group_size: int | Literal["channel"] = Field(
        default=128, description="columns that share a scale of the binary weights, and whose salient ones are chosen"
    )
    refine: int = Field(
        default=1,
        ge=0,
        le=100,
        description="rounds after the sweep: scales by least squares given the codes, then each code again given all "
        "others; 0: as in the paper",
    )

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if isinstance(self.group_size, int) and self.group_size < 8:
            raise ValueError(f"group_size {self.group_size} is too small for binary weights; write at least 8")

    def blocks(self, width: int) -> list[slice]:
        """Return the blocks of columns that share scales."""
        size = self.group_size if isinstance(self.group_size, int) else width
        return [slice(start, min(start + size, width)) for start in range(0, width, size)]

    def count(self, shape: tuple[int, int]) -> int:
        """Return the number of salient weights of a layer (out, in)."""
        return sum(self._chosen(shape[0], block) for block in self.blocks(shape[1]))

    def _chosen(self, rows: int, block: slice) -> int:
        """Return the number of salient weights in a block, at least one."""
        return max(1, round(self.salient * rows * (block.stop - block.start)))

    def effects(self, layer: LayerScheme) -> Effects:
        salient = CodesScheme(GRIDS[self.salient_weights], "channel")
        sparse = SparseScheme(SparseLayout(self.count(layer.shape)), salient)
        scheme = layer.with_parts(CodesScheme(BINARY, self.group_size), sparse)
        return replace(super().effects(layer), scheme=scheme)

    def memory(self, size: ProblemSize) -> int:
        return super().memory(size) + max(rounding_bytes(*size.shape), refine_bytes(*size.shape))

    def solve(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> Solution:
        factor = statistics.factor_of(layer.name, layer.log, self.regularization)
        weight = self.fitted(weight.float(), statistics)
        rule = _PartlyBinary(self, weight, factor.diagonal(), layer.storage)
        sweep(weight, factor, rule)
        codes, mask = rule.codes, rule.salient
        if self.refine:
            hessian = statistics.damped(self.regularization)
            codes = refined_sum(weight, codes, hessian, self.refine, layer.storage, (None, mask))
        binary, apart = (CodesPart.of(plane_codes) for plane_codes in codes)
        return Solution([binary, SparsePart.of(apart, PackedMask.of(mask))])

    def chosen(
        self, values: Float[Tensor, "out size"], pivots: Float[Tensor, " size"], block: slice
    ) -> Bool[Tensor, "out size"]:
        """Return the salient weights of a block.

        Args:
            pivots: U_jj of its columns.
        """
        # equation 3, with inv(H) = U^T U for the columns that are left
        score = values.abs() if self.score == "magnitude" else values.square() / pivots.square()
        salient = torch.zeros(values.shape, dtype=torch.bool, device=values.device)
        salient.view(-1)[score.flatten().topk(self._chosen(len(values), block)).indices] = True
        return salient


class _PartlyBinary:
    """The column rule: choose salient weights and binary scales of a block when the sweep reaches it, then round."""

    def __init__(
        self, step: PBLLM, weight: Float[Tensor, "out in"], pivots: Float[Tensor, " in"], dtype: torch.dtype
    ) -> None:
        self.step, self.pivots, self.dtype = step, pivots, dtype
        self.blocks = {block.start: block for block in step.blocks(weight.shape[1])}
        self.grid = GRIDS[step.salient_weights]
        # covers the largest weight of a row: its binary value leaves less of it, and compensation adds to it
        largest = weight.abs().amax(1, keepdim=True)
        self.step_size, _ = self.grid.fit(-largest, largest, True, dtype)
        self._masks: list[Tensor] = []
        self._scales: list[Tensor] = []
        self._signs: list[Tensor] = []
        self._apart: list[Tensor] = []

    def starts(self, width: int) -> Sequence[int]:
        return list(self.blocks)

    def open(self, column: int, remaining: Float[Tensor, "rest out"]) -> None:
        block = self.blocks[column]
        values = remaining[: block.stop - block.start].T.contiguous()
        mask = self.step.chosen(values, self.pivots[block], block)
        scale, _ = fit(values * ~mask, BINARY, "channel", True, "absmean", self.dtype, mask=~mask)
        self._masks.append(mask)
        self._scales.append(scale)
        self._start, self._mask, self._scale = column, mask, scale[:, 0]

    def compress(self, column: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        sign = BINARY.encode(values, self._scale, None)
        low = BINARY.decode(sign, self._scale, None)
        apart = self.grid.encode(values - low, self.step_size[:, 0], None) * self._mask[:, column - self._start]
        self._signs.append(sign)
        self._apart.append(apart)
        return low + self.grid.decode(apart, self.step_size[:, 0], None)

    @property
    def salient(self) -> Bool[Tensor, "out in"]:
        """True for salient weights."""
        return torch.cat(self._masks, dim=1)

    @property
    def codes(self) -> list[Codes]:
        """The binary codes, and those of the salient weights."""
        signs, apart = (torch.stack(columns, dim=1) for columns in (self._signs, self._apart))
        return [
            Codes(store(signs, BINARY), torch.cat(self._scales, dim=1), None, BINARY, self.step.group_size),
            Codes(store(apart, self.grid), self.step_size, None, self.grid, "channel"),
        ]
