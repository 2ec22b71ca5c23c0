"""The kernel of parts that hold codes of an integer grid, and its torch operator."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kernels.cpu.library import Call, Weight, library
from compress.kernels.dispatch import Part, RoundingLike

LANES, UNIT, HALF = 16, 32, 16  # rows of a tile, columns of a unit, and the piece of which groups are whole multiples
TYPES = {torch.float32: 0, torch.bfloat16: 1}
PACKED_BITS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}  # codes of 5 to 7 bits take a byte
MOST_ROWS = 512  # of x; for larger batches dequantizing once costs less than the better product of torch gains
LONGEST_GROUP = 16384  # columns that are summed in int32: 255 * 128 * 16384 < 2^31


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """The weights of a part in the layout of compress_cpu.h.

    words: int32 [tiles, units, bits, 16]. scale, zero: float32 [groups, 16 tiles]; zero None: `zero_point` everywhere.
    order: int32 [32 units], or None.
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    zero_point: float
    bits: int
    rows: int
    width: int
    group: int

    def call(self) -> Call:
        """A call with the weight filled in."""
        return Call(weight=self.weight(), threads=1)

    def weight(self) -> Weight:
        """The C structure; valid as long as the tensors are."""
        tiles = -(-self.rows // LANES)
        units = (
            self.words.numel() // max(1, tiles * self.bits * LANES) if self.order is None else len(self.order) // UNIT
        )
        return Weight(
            words=self.words.data_ptr(), scale=self.scale.data_ptr(), zero=_pointer(self.zero),
            order=_pointer(self.order), zero_point=self.zero_point, bits=self.bits, rows=self.rows, width=self.width,
            units=units, group=self.group, groups=self.scale.shape[0],
        )  # fmt: skip


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class CodesKernel:
    """Integer codes times float32 or bfloat16 inputs, or times inputs rounded to int8 in integers."""

    def supports(self, part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
        if x.dtype not in TYPES or x.device.type != "cpu" or library() is None or part.kind != "codes":
            return False
        if (torch.is_grad_enabled() and x.requires_grad) or x.numel() > MOST_ROWS * x.shape[-1]:
            return False
        return _packs(part) and (rounding is None or _rounds(rounding))

    def prepare(self, part: Part) -> PackedCodes:
        return pack(part)

    def product(
        self, x: Tensor, part: Part, prepared: PackedCodes, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        scale = None if rounding is None else getattr(rounding, "scale", None)
        if not torch.compiler.is_compiling():
            return product(x, prepared, bias, scale, rounding is not None)
        p = prepared
        return torch.ops.compress.codes_linear(
            x, p.words, p.scale, p.zero, p.order, bias, scale, p.zero_point, p.bits, p.rows, p.width, p.group,
            rounding is not None,
        )  # fmt: skip


def _packs(part: Any) -> bool:
    """Whether the codes are those of an integer grid with float scales, and whole (not only kept weights)."""
    grid, size = part.scheme.grid, part.scheme.group_size
    short = not isinstance(size, int) or size <= LONGEST_GROUP
    return hasattr(grid, "lowest") and grid.scaling.stored is None and part.lattice == part.shape and short


def _rounds(rounding: Any) -> bool:
    """Whether inputs are rounded to int8 with a zero point of zero, and none of them is left out."""
    scheme = rounding.scheme
    return scheme.grid.name == "int8" and scheme.symmetric and not scheme.outliers


def pack(part: Any) -> PackedCodes:
    """Convert a part to the layout of the kernel."""
    native = library()
    assert native is not None
    found = part.codes()
    grid, (rows, width) = found.grid, found.shape
    bits, tiles = PACKED_BITS[grid.bits], -(-rows // LANES)
    group, order, columns = _columns(found)
    scale = _tiled(found.scale, rows, -(-columns // group))
    zero = None if found.zero is None else _tiled(found.zero.float() - grid.lowest, rows, -(-columns // group))
    words = torch.empty(tiles, columns // UNIT, bits, LANES, dtype=torch.int32)
    native.compress_advise(words.data_ptr(), words.numel() * 4)
    packed = PackedCodes(words, scale, zero, order, float(-grid.lowest), bits, rows, width, group)
    codes = (found.codes.to(torch.int16) - grid.lowest).to(torch.uint8).contiguous()
    failed = native.compress_pack(
        ctypes.byref(packed.weight()), codes.data_ptr(), words.data_ptr(), torch.get_num_threads()
    )
    assert not failed, f"codes {rows} x {width} in groups of {group} do not fit the kernel"
    return packed


def _columns(codes: Any) -> tuple[int, Tensor | None, int]:
    """(columns per group, column of x for each packed column or None, packed columns).

    Groups that are no runs of a multiple of 16 columns are gathered, each padded to such a multiple.
    """
    width, size = codes.shape[1], codes.group_size
    whole = -(-width // UNIT) * UNIT
    if codes.group_index is None:
        if not isinstance(size, int):
            return min(max(whole, UNIT), LONGEST_GROUP), None, whole
        if size % HALF == 0:
            return size, None, whole
    index = torch.arange(width) // size if codes.group_index is None else codes.group_index.long()
    counts = index.bincount(minlength=codes.scale.shape[1])
    group = -(-int(counts.max()) // HALF) * HALF
    sorted_columns = index.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    place = index[sorted_columns] * group + torch.arange(width) - starts[index[sorted_columns]]
    columns = -(-len(counts) * group // UNIT) * UNIT
    order = torch.full((columns,), -1, dtype=torch.int32)
    order[place] = sorted_columns.to(torch.int32)
    return group, order, columns


def _tiled(values: Tensor, rows: int, groups: int) -> Tensor:
    """Values per scale [out or 1, stored groups] as float32 [groups, 16 tiles]; zeros where there is no row."""
    found = torch.zeros(groups, -(-rows // LANES) * LANES)
    source = torch.arange(groups).clamp(max=values.shape[1] - 1)
    found[:, :rows] = values.float().expand(rows, -1).T[source]
    return found


def product(x: Tensor, packed: PackedCodes, bias: Tensor | None, scale: Tensor | None, rounded: bool) -> Tensor:
    """x W^T + bias, with x rounded to int8 first if `rounded`; scale: static scale of x, or None."""
    native = library()
    assert native is not None
    rows = x.reshape(-1, packed.width)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    y = x.new_empty(rows.shape[0], packed.rows)
    bias = None if bias is None else bias.detach().to(x.dtype).contiguous()
    static = None if scale is None else scale.to(x.dtype).float()
    call = packed.call()
    call.x, call.y, call.bias, call.static_scale = rows.data_ptr(), y.data_ptr(), _pointer(bias), _pointer(static)
    call.m, call.ldx, call.type, call.rounded = rows.shape[0], rows.stride(0), TYPES[x.dtype], rounded
    call.threads = torch.get_num_threads()
    failed = native.compress_product(ctypes.byref(call))
    if failed == -2:
        raise MemoryError("the buffers of a kernel do not fit into memory")
    assert not failed, "sizes of a packed weight do not fit together"
    return y.reshape(*x.shape[:-1], packed.rows)


_LIBRARY = torch.library.Library("compress", "DEF")
_LIBRARY.define(
    "codes_linear(Tensor x, Tensor words, Tensor scale, Tensor? zero, Tensor? order, Tensor? bias, "
    "Tensor? input_scale, float zero_point, int bits, int rows, int width, int group, bool rounded) -> Tensor"
)


def _codes_linear(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor | None, bias: Tensor | None,
    input_scale: Tensor | None, zero_point: float, bits: int, rows: int, width: int, group: int, rounded: bool,
) -> Tensor:  # fmt: skip
    packed = PackedCodes(words, scale, zero, order, zero_point, bits, rows, width, group)
    return product(x, packed, bias, input_scale, rounded)


def _shape_of_codes_linear(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], rest[8])


_LIBRARY.impl("codes_linear", _codes_linear, "CPU")
torch.library.register_fake("compress::codes_linear", _shape_of_codes_linear, lib=_LIBRARY)
