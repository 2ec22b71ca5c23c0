"""Rounding inside the column sweep: the rule by which GPTQ makes codes of columns, and what it rounded to get them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.numerics.codes import Codes, GroupSize, ScaleSearch, fit, groups_in, spread, store
from compress.numerics.grids import Grid


class Rounding:
    """The column rule of GPTQ: round each column to its group's scale, fitted when the group is reached.

    keep_wanted: remember what each column was when its turn came, for those who round it again.
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
        keep_wanted: bool = False,
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
        self._wanted: list[Tensor] | None = [] if keep_wanted else None
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
        if self._wanted is not None:
            self._wanted.append(values.clone())
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

    def wanted(self, order: Int[Tensor, " in"]) -> Float[Tensor, "out in"]:
        """What was rounded, with the errors of earlier columns made up for, in the original order of the columns."""
        assert self._wanted is not None, "keep_wanted was not asked for"
        return torch.stack(self._wanted, dim=1)[:, order.argsort()]
