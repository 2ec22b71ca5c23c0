"""Rounding inside the column sweep: the column rule of GPTQ, with its codes and the values before rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from compress.native import columns as native
from compress.numerics.column_sweep import sweep, sweep_bytes
from compress.numerics.linalg import factor_bytes
from compress.numerics.quant.codes import Codes, GroupSize, ScaleSearch, fit, fit_shared, groups_in, spread, store
from compress.numerics.quant.grids import Grid


@dataclass(frozen=True)
class GridOptions:
    """The grid and scales that a weight is rounded to: options of `codes.fit`.

    Attributes:
        grid: see `codes.fit`.
        group_size: see `codes.fit`.
        symmetric: see `codes.fit`.
        search: see `codes.fit`.
        dtype: see `codes.fit`.
        shared_absmax: see `codes.fit_shared`.
        importance: see `codes.fit`.
        signed: see `codes.fit`.
        fixed_scales: scales and zero points of all groups, [out, groups], which are then not fitted. They need an order
            of the columns (`round_columns`) and groups that are formed before the columns are reordered.
    """

    grid: Grid
    group_size: GroupSize
    symmetric: bool
    search: ScaleSearch
    dtype: torch.dtype
    shared_absmax: float | None = None
    importance: Float[Tensor, " in"] | None = None
    signed: bool = False
    fixed_scales: tuple[Tensor, Tensor | None] | None = None


def round_weighted(weight: Float[Tensor, "out in"], options: GridOptions) -> Codes:
    """Round every weight to the nearest value of the grid; scales have the least error weighted by the importance.

    Args:
        weight: the weight; pruned weights are zero.
        options: with importance.
    """
    grid, size, width, importance = options.grid, options.group_size, weight.shape[1], options.importance
    shared = fit_shared(weight, grid, size, options.shared_absmax, "importance", importance)
    scale, zero = fit(
        weight,
        grid,
        size,
        options.symmetric,
        "importance",
        options.dtype,
        shared,
        importance=importance,
        signed=options.signed,
    )
    zeros = None if zero is None else spread(zero, width, size)
    codes = grid.encode(weight, spread(scale, width, size), zeros)
    return Codes(store(codes, grid), scale, zero, grid, size, shared=shared)


def round_columns(
    weight: Float[Tensor, "out in"],
    factor: Float[Tensor, "in in"],
    options: GridOptions,
    mask: Bool[Tensor, "out in"] | None = None,
    order: Int[Tensor, " in"] | None = None,
    regroup: bool = False,
    record_targets: bool = False,
) -> Rounding:
    """Round column by column and compensate each error in the later columns (GPTQ, algorithm 1).

    Args:
        weight: the weight to round.
        factor: U of `linalg.inverse_factor`, in the order of the sweep.
        options: grid and scales.
        mask: True for unpruned weights.
        order: column of each step of the sweep; None: unchanged.
        regroup: whether groups are formed in the new order. Otherwise groups and scales are fixed before columns are
            reordered.
        record_targets: whether to record `Rounding.targets`.

    Returns:
        The column rule; its `codes` are the result.
    """
    rule = Rounding(weight, options, mask, order, regroup, record_targets)
    sweep(_ordered(weight, order), factor, rule)
    return rule


def rounding_bytes(rows: int, width: int) -> int:
    """Return the peak memory of factoring a Hessian and then rounding a weight [rows, width], in bytes.

    The factor itself is not counted; its statistics hold it. The sweep also holds the weight in its order, and the
    codes with two copies while they are stacked.
    """
    return max(factor_bytes(width) - 4 * width * width, sweep_bytes(rows, width) + (4 + 3) * rows * width)


def _ordered(matrix: Float[Tensor, "out in"], order: Int[Tensor, " in"] | None) -> Float[Tensor, "out in"]:
    return matrix if order is None else matrix[:, order]


class Rounding:
    """Column rule of GPTQ: round each column to its group's scale, which is fitted when the sweep reaches the group.

    Arguments as in `round_columns`. With `record_targets`, each column is recorded before it is rounded, so that it can
    be
    rounded again.

    Attributes:
        keep: the mask, [in, out] in the order of the sweep, or None. A caller that chooses the mask during the sweep
            updates it in place.
    """

    def __init__(
        self,
        weight: Float[Tensor, "out in"],
        options: GridOptions,
        mask: Bool[Tensor, "out in"] | None = None,
        order: Int[Tensor, " in"] | None = None,
        regroup: bool = False,
        record_targets: bool = False,
    ) -> None:
        self.options, self.grid, self.order, self.regroup = options, options.grid, order, regroup
        self.keep = None if mask is None else _ordered(mask, order).T.contiguous()
        importance = None if options.importance is None else options.importance[None]
        self.importance = importance if importance is None or not regroup else _ordered(importance, order)
        self.shared = fit_shared(
            _ordered(weight, order) if regroup else weight,
            self.grid,
            options.group_size,
            options.shared_absmax,
            options.search,
            None if self.importance is None else self.importance[0],
        )
        self._scales: list[Tensor] = []
        self._zeros: list[Tensor] = []
        self._codes: list[Tensor] = []  # of consecutive columns, [columns, out]
        self._targets: list[Tensor] | None = [] if record_targets else None
        self._fixed: tuple[Tensor, Tensor | None] | None = None
        self._group_of: Int[Tensor, " in"] | None = None  # in the order of the sweep
        static = order is not None and not regroup
        assert static or options.fixed_scales is None, "known scales require groups of columns in their original order"
        if static or not isinstance(options.group_size, int):
            masked_weight = weight if mask is None else weight * mask
            fitted = options.fixed_scales or self._fit(
                masked_weight, options.group_size, self.shared, mask, slice(None)
            )
            self._fixed = fitted
            if order is not None and static:  # every column keeps the scale of its original group in any order
                size = options.group_size if isinstance(options.group_size, int) else weight.shape[1]
                self._group_of = order // size

    def _fit(
        self, weight: Tensor, group_size: GroupSize, shared: Tensor | None, mask: Tensor | None, columns: slice
    ) -> tuple[Tensor, Tensor | None]:
        """Fit the scales and zero points of a slice of columns."""
        options, importance = self.options, None if self.importance is None else self.importance[0, columns]
        return fit(
            weight,
            self.grid,
            group_size,
            options.symmetric,
            options.search,
            options.dtype,
            shared,
            mask,
            importance,
            options.signed,
        )

    def starts(self, width: int) -> Sequence[int]:
        size = self.options.group_size
        return [0] if self._fixed is not None or not isinstance(size, int) else range(0, width, size)

    def open(self, column: int, remaining: Float[Tensor, "rest out"]) -> None:
        if self._fixed is None:
            size = self.options.group_size
            assert isinstance(size, int)
            part, mask = remaining[:size].T, None
            if self.keep is not None:
                mask = self.keep[column : column + size].T
                part = part * mask
            rows, groups = remaining.shape[1], groups_in(column + remaining.shape[0], size)
            scale, zero = self._fit(
                part,
                "channel",
                self.grid.scaling.part(self.shared, rows, groups, column // size),
                mask,
                slice(column, column + size),
            )
            self._scales.append(scale)
            self._group_scale = scale[:, 0].contiguous(), None if zero is None else zero[:, 0].contiguous()
            if zero is not None:
                self._zeros.append(zero)
        elif self._group_of is None:
            scale, zero = self._fixed
            self._group_scale = scale[:, 0], None if zero is None else zero[:, 0]

    def _scales_of(self, columns: int | slice) -> tuple[Tensor, Tensor | None]:
        """Return the scales and zero points of columns, [columns, out]; [out] if they are equal for all columns."""
        if self._group_of is None or self._fixed is None:
            return self._group_scale
        scale, zero = self._fixed
        groups = self._group_of[columns]
        return scale[:, groups].movedim(0, -1), None if zero is None else zero[:, groups].movedim(0, -1)

    def compress_part(
        self, column: int, values: Float[Tensor, "part out"], ratios: Float[Tensor, "part part"]
    ) -> tuple[Tensor, Tensor] | None:
        columns = slice(column, column + len(values))
        scale, zero = self._scales_of(columns)
        shape = values.shape[-scale.dim() :]
        grid = self.grid.scaled(scale.expand(shape), None if zero is None else zero.expand(shape))
        if grid is None or len(values) > native.MAX_COLUMNS or not native.usable(values, grid):
            return None
        keep = None if self.keep is None else self.keep[columns]
        rounded = native.sweep(values, ratios, grid, keep, self._targets is not None)
        if self._targets is not None and rounded.targets is not None:
            self._targets.append(rounded.targets)
        self._codes.append(store(rounded.codes, self.grid))
        return rounded.values, rounded.moves

    def compress(self, column: int, values: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
        scale, zero = self._scales_of(column)
        if self.keep is not None:
            values = values * self.keep[column]
        if self._targets is not None:
            self._targets.append(values.clone()[None])
        codes = self.grid.encode(values, scale, zero)
        self._codes.append(store(codes[None], self.grid))
        return self.grid.decode(codes, scale, zero)

    @property
    def codes(self) -> Codes:
        """The codes of all columns, in their original order."""
        if self._fixed is None:
            scale, zero = torch.cat(self._scales, dim=1), torch.cat(self._zeros, dim=1) if self._zeros else None
        else:
            scale, zero = self._fixed
        size, index = self.options.group_size, None
        if self.order is not None and self.regroup:
            assert isinstance(size, int)
            index = (torch.arange(len(self.order), device=scale.device) // size)[self.order.argsort()].to(torch.int32)
        return Codes(self._stacked(self._codes), scale, zero, self.grid, size, index, self.shared)

    @property
    def targets(self) -> Float[Tensor, "out in"]:
        """The values that were rounded, compensated for earlier columns, in the original order of the columns."""
        assert self._targets is not None, "record_targets is False"
        return self._stacked(self._targets)

    def _stacked(self, columns: list[Tensor]) -> Float[Tensor, "out in"]:
        stacked = torch.cat(columns)
        return (stacked if self.order is None else stacked[self.order.argsort()]).T.contiguous()
