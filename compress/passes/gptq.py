"""GPTQ: round column by column and let the columns to come make up for the error (Frantar 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from compress.contract import Layer
from compress.numerics.codes import Codes, GroupSize, ScaleSearch, fit, groups_in, share, spread, store
from compress.numerics.grids import Grid
from compress.numerics.obs import sweep
from compress.quantizing import QuantizingPass
from compress.stream.observers import CrossGram, Gram, Observer

DAMPING = 0.01  # GPTQ, section 3.3, step 3: 1% of the mean diagonal
ALPHA = 1.0


class GPTQ(QuantizingPass):
    """Minimize ||W X - Q X||^2 greedily over columns, with the error of each made up for by the later ones.

    act_order: 'none' keeps the order of columns; 'static' sweeps columns of large input first with the groups and
    their scales fixed beforehand; 'group' forms the groups in that order, so that an index per column is stored.

    error: 'asymmetric' minimizes ||W X~ - Q X||^2, with X~ the inputs in the uncompressed model and X those behind the
    compressed layers (GPTAQ, arXiv 2504.02692, equation 6). The weight without rounding that is best for it is known,
    V = W X~ X^T inv(X X^T), and ||W X~ - Q X||^2 = ||V X - Q X||^2 + a constant; so the sweep starts from V, where
    GPTAQ adds up the same correction column by column and leaves out its part in columns already rounded.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2210.17323"
    observes: ClassVar[type[Observer]] = Gram

    act_order: Literal["none", "static", "group"] = Field(
        default="none", description="the order of columns in the sweep"
    )
    damping: float = Field(default=DAMPING, gt=0, le=1, description="added to the diagonal, as a share of its mean")
    error: Literal["symmetric", "asymmetric"] = Field(
        default="symmetric",
        description="'asymmetric' aims at the output that the uncompressed model has, whose activations run alongside",
    )
    alpha: float = Field(
        default=ALPHA, gt=0, le=1, description="error: asymmetric alone: how much of the way to aim, 1 is all of it"
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.act_order == "group" and not isinstance(self.group_size, int):
            raise ValueError(f"act_order: group needs a number as group_size, not {self.group_size!r}; use static")
        if self.error == "symmetric" and self.alpha != ALPHA:
            raise ValueError("alpha has no meaning with error: symmetric; leave it out, or use error: asymmetric")

    @property
    def indexed(self) -> bool:
        return self.act_order == "group"

    @property
    def observer(self) -> type[Observer]:
        return CrossGram if self.error == "asymmetric" else Gram

    def codes(self, weight: Float[Tensor, "out in"], seen: Gram, layer: Layer) -> Codes:
        order = None
        if self.act_order != "none":
            order = seen.hessian.diagonal().argsort(descending=True, stable=True)
        factor = seen.factor_of(layer.name, layer.note, self.damping, order)
        weight, mask = weight.float(), layer.mask
        if isinstance(seen, CrossGram):
            # argmin_V ||W X~ - V X||^2 = W X~ X^T inv(X X^T) = W + W (X~ - X) X^T inv(X X^T)
            weight = torch.addmm(weight, weight, seen.shift(self.damping, order), alpha=self.alpha)
        shared = share(weight, self.grid, self.group_size, layer.peak)
        scale = zero = None
        if self.act_order == "static" or not isinstance(self.group_size, int):
            masked = weight if mask is None else weight * mask
            scale, zero = fit(masked, self.grid, self.group_size, self.symmetric, self.scale, layer.storage, shared)
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
