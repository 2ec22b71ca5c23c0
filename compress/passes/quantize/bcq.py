"""Binary-coded quantization: a weight is a sum of binary planes with scales (Rastegari 2016, Xu 2018, Park 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.column_sweep import sweep
from compress.numerics.quant.codes import Codes, store
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.planes import Levels, alternated, greedy, signs_of
from compress.numerics.quant.refine_planes import planes_bytes, refined_planes
from compress.numerics.quant.rounding import rounding_bytes
from compress.numerics.quant.scales import positive
from compress.numerics.quant.weighted_search import importance_of
from compress.passes.contract.facts import Effects, Fact
from compress.passes.contract.layers import Layer, Solution
from compress.passes.contract.memory import ProblemSize
from compress.passes.contract.observers import Gram
from compress.passes.families.compensation import CompensatingPass

BINARY = GRIDS["binary"]
ROUNDS = 15  # Xu 2018, section 3: two rounds are near the end; each is cheap here


class BCQ(CompensatingPass):
    """Store a weight as `bits` planes of signs: W = sum_i a_i B_i, with scales a_i per row and group of columns.

    The solver 'greedy' makes each plane of the signs of what the planes before it leave, with the mean magnitude of
    that as its scale. 'alternating' then improves signs (the nearest of all sums) and scales (least squares) in turns.
    The levels are not evenly spaced, unlike those of integers.

    A layer has the layout of LUT-GEMM (arXiv 2206.09557), whose products look up sums of inputs: each plane is a matrix
    of bits with a scale per group.

    The sweep of GPTQ compensates each column's error in later ones, and its weights apply to the squared errors.
    `refine` improves scales and signs after the sweep. The papers have neither.
    """

    use_for: ClassVar[str] = (
        "2 and 3 bits without zero points, if distill trains all scales afterwards: the levels follow the weights."
    )
    not_for: ClassVar[str] = (
        "4 bits, where a scale per plane costs more than the levels gain. Speed: each plane is one product."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2206.09557"
    never_after: ClassVar[frozenset[Fact]] = frozenset({"quantized", "masked"})
    makes: ClassVar[frozenset[Fact]] = frozenset({"quantized"})

    bits: int = Field(default=3, ge=1, le=5, description="number of planes")
    group_size: int | Literal["channel"] = Field(default=128, description="columns that share the scales of all planes")
    solver: Literal["greedy", "alternating"] = Field(
        default="alternating",
        description="'greedy': plane after plane; 'alternating': signs and scales in turns after it",
    )
    order: Literal["natural", "static"] = Field(
        default="static",
        description="order of the columns in the sweep; 'static': columns with large inputs first, and the scales of "
        "all groups before the sweep",
    )
    refine: int = Field(
        default=4,
        ge=0,
        le=100,
        description="rounds after the sweep: scales of all planes by least squares given the signs, then the signs of "
        "each weight again given all others",
    )

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if isinstance(self.group_size, int) and self.group_size < 8:
            raise ValueError(f"group_size {self.group_size} is too small for {self.bits} scales; write at least 8")

    def effects(self, layer: LayerScheme) -> Effects:
        planes = [CodesScheme(BINARY, self.group_size)] * self.bits
        return replace(super().effects(layer), scheme=layer.with_parts(*planes))

    def memory(self, size: ProblemSize) -> int:
        return super().memory(size) + planes_bytes(*size.shape, self.bits) + rounding_bytes(*size.shape)

    def blocks(self, width: int) -> list[slice]:
        """Return the groups of columns."""
        size = self.group_size if isinstance(self.group_size, int) else width
        return [slice(start, min(start + size, width)) for start in range(0, width, size)]

    def solve(self, weight: Float[Tensor, "out in"], statistics: Gram, layer: Layer) -> Solution:
        order = None if self.order == "natural" else statistics.diagonal.argsort(descending=True, stable=True)
        factor = statistics.factor_of(layer.name, layer.log, self.regularization, order)
        weight = self.fitted(weight.float(), statistics, order)
        rule = _Planes(self, weight, importance_of(factor, order), layer.storage, order)
        sweep(weight if order is None else weight[:, order], factor, rule)
        planes = rule.planes
        if self.refine:
            hessian = statistics.damped(self.regularization, order)
            planes = refined_planes(weight, planes, hessian, self.refine, layer.storage, order)
        return Solution([CodesPart.of(plane) for plane in planes])

    def scales(
        self, values: Float[Tensor, "out size"], importance: Float[Tensor, " size"]
    ) -> Float[Tensor, "out planes"]:
        """Return the scales of all planes of a group of columns."""
        binary = greedy(values, importance, self.bits)
        return binary if self.solver == "greedy" else alternated(values, importance, binary, ROUNDS)


class _Planes:
    """The column rule: find the scales of a group when the sweep reaches it, then take the nearest sum.

    Attributes:
        order: of the columns in the sweep; the scales of all groups are then found before it. None: as they come.
    """

    def __init__(
        self,
        step: BCQ,
        weight: Float[Tensor, "out in"],
        importance: Float[Tensor, " in"],
        dtype: torch.dtype,
        order: Int[Tensor, " in"] | None,
    ) -> None:
        self.step, self.importance, self.dtype, self.order = step, importance, dtype, order
        self.blocks = step.blocks(weight.shape[1])
        self._groups = [group for group, block in enumerate(self.blocks) for _ in range(block.stop - block.start)]
        self._scales = [] if order is None else [self._found(weight[:, block], block) for block in self.blocks]
        self._levels = [Levels(scales) for scales in self._scales]
        self._index: list[Tensor] = []

    def _found(self, values: Float[Tensor, "out size"], block: slice) -> Float[Tensor, "out planes"]:
        return positive(self.step.scales(values.contiguous(), self.importance[block]), self.dtype)

    def starts(self, width: int) -> Sequence[int]:
        return [0] if self.order is not None else [block.start for block in self.blocks]

    def open(self, column: int, remaining: Float[Tensor, "rest out"]) -> None:
        if self.order is None:
            block = self.blocks[self._groups[column]]
            self._scales.append(self._found(remaining[: block.stop - block.start].T, block))
            self._levels.append(Levels(self._scales[-1]))

    def compress(self, column: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        levels = self._levels[self._groups[column if self.order is None else int(self.order[column])]]
        index, value = levels.nearest(values[:, None])
        self._index.append(index)
        return value[:, 0]

    @property
    def planes(self) -> list[Codes]:
        """The codes of all planes."""
        scales = torch.stack(self._scales, dim=1)  # [out, groups, planes]
        index = torch.cat(self._index, dim=1)
        signs = signs_of(index if self.order is None else index[:, self.order.argsort()], self.step.bits)
        return [
            Codes(store(signs[..., i] > 0, BINARY), scales[..., i].contiguous(), None, BINARY, self.step.group_size)
            for i in range(self.step.bits)
        ]
