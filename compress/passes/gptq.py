"""GPTQ: round column by column and let the columns to come make up for the error (Frantar 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from compress.contract import Layer, QuantizingPass
from compress.errors import NumericError
from compress.numerics.codes import Codes, GroupSize, ScaleSearch, fit, groups_in, share, spread, store
from compress.numerics.grids import Grid
from compress.numerics.obs import sweep
from compress.stream.observers import Gram, Observer

DAMPING = 0.01  # GPTQ, section 3.3, step 3: 1% of the mean diagonal


class GPTQ(QuantizingPass):
    """Minimize ||W X - Q X||^2 greedily over columns, with the error of each made up for by the later ones.

    act_order: 'none' keeps the order of columns; 'static' sweeps columns of large input first with the groups and
    their scales fixed beforehand; 'group' forms the groups in that order, so that an index per column is stored.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2210.17323"
    observes: ClassVar[type[Observer]] = Gram

    act_order: Literal["none", "static", "group"] = Field(
        default="none", description="the order of columns in the sweep"
    )
    damping: float = Field(default=DAMPING, gt=0, le=1, description="added to the diagonal, as a share of its mean")

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.act_order == "group" and not isinstance(self.group_size, int):
            raise ValueError(f"act_order: group needs a number as group_size, not {self.group_size!r}; use static")

    @property
    def indexed(self) -> bool:
        return self.act_order == "group"

    def codes(self, weight: Float[Tensor, "out in"], seen: Gram, layer: Layer) -> Codes:
        if seen.tokens == 0:
            raise NumericError(f"{layer.name}: no calibration token reached this layer")
        order = None
        if self.act_order != "none":
            order = seen.hessian.diagonal().argsort(descending=True, stable=True)
        factor, damping, dead = seen.factor(self.damping, order)
        if damping != self.damping:
            layer.note("fallback", "damping raised until the Hessian was positive definite", damping=damping)
        if dead:
            layer.note("note", "input channels that were always zero are rounded to nearest", channels=dead)
        weight, mask = weight.float(), layer.mask
        shared = share(weight, self.grid, self.group_size, layer.peak)
        scale = zero = None
        if self.act_order == "static" or not isinstance(self.group_size, int):
            scale, zero = fit(weight, self.grid, self.group_size, self.symmetric, self.scale, layer.storage, shared)
        if order is not None:
            weight, mask = weight[:, order], None if mask is None else mask[:, order]
        if self.indexed:  # the groups are those of the new order
            shared = share(weight, self.grid, self.group_size, layer.peak)
        rule = Rounding(
            self.grid, self.group_size, self.symmetric, self.scale, layer.storage, mask, scale, zero, shared
        )
        if self.act_order == "static":
            rule.fix(order, weight.shape[1])
        sweep(weight, factor, rule)
        return rule.result(order, indexed=self.indexed)


class Rounding:
    """The column rule of GPTQ: round each column to its group's scale, fitted when the group is reached.

    Rows of `codes` are columns of the weight, in the order of the sweep.
    """

    def __init__(
        self,
        grid: Grid,
        group_size: GroupSize,
        symmetric: bool,
        search: ScaleSearch,
        storage: torch.dtype,
        mask: Bool[Tensor, "out in"] | None,
        scale: Float[Tensor, "out groups"] | None,
        zero: Float[Tensor, "out groups"] | None,
        shared: Float[Tensor, " n"] | None,
    ) -> None:
        self.grid, self.symmetric, self.storage = grid, symmetric, storage
        self.group_size: GroupSize = group_size
        self.search: ScaleSearch = search
        self.keep = None if mask is None else mask.T.contiguous()
        self.scale, self.zero, self.shared = scale, zero, shared
        self._fixed = scale is not None
        self._scales: list[Tensor] = []
        self._zeros: list[Tensor] = []
        self._codes: list[Tensor] = []
        self._per_column: tuple[Tensor, Tensor | None] | None = None

    def fix(self, order: Tensor | None, width: int) -> None:
        """Static groups: every column keeps the scale of its original group, whatever the order."""
        assert self.scale is not None and order is not None
        scale = spread(self.scale, width, self.group_size).expand(-1, width)[:, order].T.contiguous()
        zero = None
        if self.zero is not None:
            zero = spread(self.zero, width, self.group_size).expand(-1, width)[:, order].T.contiguous()
        self._per_column = scale, zero

    def starts(self, width: int) -> Sequence[int]:
        if self._fixed or not isinstance(self.group_size, int):
            return [0]
        return range(0, width, self.group_size)

    def open(self, column: int, rest: Float[Tensor, "rest out"]) -> None:
        if not self._fixed:
            assert isinstance(self.group_size, int)
            columns = slice(column, column + self.group_size)
            part = rest[: self.group_size].T
            if self.keep is not None:
                part = part * self.keep[columns].T
            rows, groups = rest.shape[1], groups_in(column + rest.shape[0], self.group_size)
            shared = self.grid.scaling.part(self.shared, rows, groups, column // self.group_size)
            scale, zero = fit(part, self.grid, "channel", self.symmetric, self.search, self.storage, shared)
            self._scales.append(scale)
            self._now = scale[:, 0].contiguous(), None if zero is None else zero[:, 0].contiguous()
            if zero is not None:
                self._zeros.append(zero)
        elif self._per_column is None:
            assert self.scale is not None
            self._now = self.scale[:, 0], None if self.zero is None else self.zero[:, 0]

    def compress(self, column: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        if self._per_column is None:
            scale, zero = self._now
        else:
            scales, zeros = self._per_column
            scale, zero = scales[column], None if zeros is None else zeros[column]
        if self.keep is not None:
            values = values * self.keep[column]
        codes = self.grid.encode(values, scale, zero)
        self._codes.append(codes)
        return self.grid.decode(codes, scale, zero)

    def result(self, order: Tensor | None, indexed: bool) -> Codes:
        """All columns in their original order."""
        codes = torch.stack(self._codes, dim=1)
        width = codes.shape[1]
        scale = torch.cat(self._scales, dim=1) if self.scale is None else self.scale
        zero = self.zero if self._fixed else (torch.cat(self._zeros, dim=1) if self._zeros else None)
        index = None
        if order is not None:
            back = order.argsort()
            codes = codes[:, back]
            if indexed:
                assert isinstance(self.group_size, int)
                assert groups_in(width, self.group_size) == scale.shape[1]
                index = (torch.arange(width, device=codes.device) // self.group_size)[back].to(torch.int32)
        return Codes(store(codes, self.grid), scale, zero, self.grid, self.group_size, index, self.shared)
