"""Packed weights in the layout of the C library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from compress.native.library import LANES, Weight, check_status, library, pointer

OUTSIDE = -3  # what compress_check_weight returns for indexes outside of a weight
UNIT = 32  # columns of a unit; a tile has LANES rows
BOOKS = "tables", "books", "entries", "length"  # fields of compress_weight
SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # compress_scale of compress_cpu.h
TILES = "step_bits", "states", "tile_rows", "tile_columns"  # fields of compress_weight for trellis paths


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """The weights of a part in the layout of compress_cpu.h. Its indexes are checked once, before the first product.

    Attributes:
        words: codes: int32 [tiles, units, bits, 16]. Packed sparse floats: [weights + 16]. Dense floats: [out, in].
            Looked-up weights: uint8 [out, bytes].
        scale: [tiles, groups, 16], float32 or `narrowed`.
        zero: like `scale`; None: `zero_point` everywhere.
        table: float32 [2^codec], or [tables, books, entries, length] for looked-up weights; None for others.
        order: int32 [32 units], the column of x of each packed column, or None.
        masks: int16 [tiles, 32 units] of packed sparse floats; None for others.
        offsets: int64 [tiles] of packed sparse floats; None for others.
        zero_point: zero point of all weights.
        codec: compress_codec of compress_cpu.h.
        rows: number of rows.
        width: number of columns.
        group: columns that share a scale.
        narrow: whether float32 inputs may be rounded to bfloat16.
        tiles: the numbers of `TILES` for trellis paths; empty for others.
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    table: Tensor | None
    order: Tensor | None
    masks: Tensor | None
    offsets: Tensor | None
    zero_point: float
    codec: int
    rows: int
    width: int
    group: int
    narrow: bool = False
    tiles: Sequence[int] = ()

    @cached_property
    def weight(self) -> Weight:
        """The C structure; valid as long as the tensors are.

        Raises ValueError for sizes that do not fit together, and for indexes outside of the weight.
        """
        sizes: dict[str, int] = {}
        if self.tiles:
            sizes.update(zip(TILES, self.tiles, strict=True))
        if self.table is not None and self.table.dim() == 4:
            sizes.update(zip(BOOKS, self.table.shape, strict=True))
        if sizes:
            sizes["stride"] = self.words.stride(0)
        weight = Weight(
            words=self.words.data_ptr(),
            scale=self.scale.data_ptr(),
            zero=pointer(self.zero),
            table=pointer(self.table),
            order=pointer(self.order),
            masks=pointer(self.masks),
            offsets=pointer(self.offsets),
            zero_point=self.zero_point,
            codec=self.codec,
            rows=self.rows,
            width=self.width,
            units=self.units,
            group=self.group,
            groups=self.scale.shape[1],
            scale_type=SCALES[self.scale.dtype],
            zero_type=0 if self.zero is None else SCALES[self.zero.dtype],
            **sizes,
        )
        self._check(weight)
        return weight

    def _check(self, weight: Weight) -> None:
        """Check what products rely on: indexes that lead outside of the tensors would be read there."""
        native = library()
        assert native is not None
        lengths = [0 if tensor is None else tensor.numel() for tensor in (self.words, self.order, self.offsets)]
        status = native.compress_check_weight(ctypes.addressof(weight), *lengths)
        if status == OUTSIDE:
            raise ValueError(f"a packed weight [{self.rows}, {self.width}] holds columns or row starts outside of it")
        if status:
            raise ValueError(f"the sizes of a packed weight [{self.rows}, {self.width}] do not fit together")

    @cached_property
    def address(self) -> int:
        """The address of the C structure."""
        return ctypes.addressof(self.weight)

    @property
    def units(self) -> int:
        """Number of runs of 32 packed columns."""
        if self.words.dim() == 2:  # rows of floats
            return -(-self.width // UNIT)
        return self.words.shape[1] if self.masks is None else self.masks.shape[1] // UNIT

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, in the order of the operator's arguments."""
        return self.words, self.scale, self.zero, self.table, self.order, self.masks, self.offsets

    @property
    def numbers(self) -> tuple[float, int, int, int, int, bool, list[int]]:
        """The numbers, in the order of the operator's arguments."""
        return self.zero_point, self.codec, self.rows, self.width, self.group, self.narrow, list(self.tiles)

    def columns(self, columns: Tensor) -> Tensor:
        """Return the weights [rows, n] of the columns of x with these indices (int64 [n]), as float32."""
        if self.order is not None:
            has_column = self.order >= 0
            position = torch.empty(self.width, dtype=torch.int64)
            position[self.order[has_column].long()] = has_column.nonzero()[:, 0]
            columns = position[columns]
        indices, codes = columns.int(), torch.empty(self.rows, len(columns), dtype=torch.uint8)
        native = library()
        assert native is not None
        status = native.compress_codes(
            self.address, indices.data_ptr(), len(indices), codes.data_ptr(), torch.get_num_threads()
        )
        check_status(status, "columns are outside of a packed weight")
        zero = self.zero_point if self.zero is None else self._spread(self.zero, columns)
        return (codes - zero) * self._spread(self.scale, columns)

    def _spread(self, values: Tensor, columns: Tensor) -> Tensor:
        """Expand values per group to each row and packed column."""
        return values.float()[:, columns // self.group].mT.flatten(0, 1)[: self.rows]


def narrowed(values: Tensor) -> Tensor:
    """Return float32 values as bfloat16 or float16 numbers if all are exact; otherwise unchanged."""
    if torch.equal(values.bfloat16().float(), values):
        return values.bfloat16()
    half, sizes = values.half(), values.abs()
    normal = (sizes == 0) | ((sizes >= torch.finfo(torch.float16).tiny) & sizes.isfinite())
    return half if bool(normal.all()) and torch.equal(half.float(), values) else values


def of_bytes(
    codec: int,
    words: Tensor,
    table: Tensor | None,
    scale: Tensor | None,
    shape: tuple[int, int],
    narrow: bool,
    group: int | None = None,
    tiles: Sequence[int] = (),
) -> PackedCodes:
    """Describe weights that are read from the bytes of each row, or each row of tiles.

    Args:
        codec: compress_codec of compress_cpu.h.
        words: uint8 [out, bytes].
        table: [tables, books, entries, length], or None.
        scale: [out or 1, groups]; None: 1.
        shape: (out, in).
        narrow: as of `PackedCodes`.
        group: columns that share a scale, a multiple of 16; None: whole rows.
        tiles: as of `PackedCodes`.
    """
    rows, width = shape
    columns = -(-width // UNIT) * UNIT
    group = group or columns
    count, groups = -(-rows // LANES), -(-columns // group)
    scales = torch.zeros(count * LANES, groups)
    if scale is None:
        scales[:rows] = 1
    else:
        scales[:rows, : scale.shape[1]] = scale.float()
    tiled = scales.view(count, LANES, groups).mT.contiguous()
    return PackedCodes(words, tiled, None, table, None, None, None, 0.0, codec, rows, width, group, narrow, tiles)
