"""Products of packed codes on the CPU, and their torch operator."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.kernels.contract import PartLike, RoundingLike
from compress.kernels.cpu.packed import UNIT, PackedCodes, narrowed
from compress.kernels.recording import as_operators
from compress.native.library import LANES, available, check_status, library, pointer
from compress.native.pages import PAGES

HALF = 16  # groups are multiples of so many columns
TYPES = {torch.float32: 0, torch.bfloat16: 1}
CODECS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}  # by bits; codes of 5 to 7 bits take a byte
FLOATS = {torch.float8_e4m3fn: 9, torch.float8_e5m2: 10}
LONGEST_GROUP = 16384  # columns that are summed in int32: 255 * 128 * 16384 < 2^31
UNQUANTIZED, TO_INTEGERS, TO_BF16, TO_INTEGERS_GROUPS = 0, 1, 2, 3  # compress_rounding of compress_cpu.h

Mode = tuple[int, int, float]
"""Activation quantization: a compress_rounding, the bits of integers, and the fraction of a range that they cover."""

UNROUNDED: Mode = (UNQUANTIZED, 8, 1.0)


def reads(x: Tensor, rounding: RoundingLike | None = None) -> bool:
    """Whether the library can read these inputs: float32 or bfloat16 on the CPU, not quantized, without gradients."""
    if rounding is not None or x.dtype not in TYPES or not x.is_cpu:
        return False
    return available() and not (x.requires_grad and torch.is_grad_enabled())


class PackedKernel:
    """A kernel whose prepared weights are `PackedCodes`."""

    def handle(self, prepared: PackedCodes) -> int:
        return handle_of(prepared)

    def mode(self, rounding: RoundingLike | None) -> Mode:
        return _mode(rounding)

    def product(
        self, x: Tensor, part: PartLike, prepared: PackedCodes, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        """Compute x W^T + bias, for kernels without activation quantization."""
        return linear(x, prepared, bias)


class CodesKernel(PackedKernel):
    """Codes times float32 or bfloat16 inputs, or integer codes times inputs quantized to integers, in integers."""

    def supports(self, part: PartLike, x: Tensor, rounding: RoundingLike | None) -> bool:
        if not reads(x) or not (part.is_prepared(self) or _packs(part)):
            return False
        return rounding is None or _rounds(part, rounding)

    def prepare(self, part: PartLike) -> PackedCodes:
        return pack(part)

    def product(
        self, x: Tensor, part: PartLike, prepared: PackedCodes, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        if rounding is None:
            return linear(x, prepared, bias)
        quantizer: Any = rounding
        return linear(x, prepared, bias, _mode(rounding), quantizer.scale, quantizer.threshold, quantizer.columns)

    def products(
        self, x: Tensor, parts: Sequence[PartLike], rounding: RoundingLike | None, biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        biases = [b if b is None or b.dtype == x.dtype else b.to(x.dtype) for b in biases]
        return products(x, [part.prepared(self) for part in parts], biases, _mode(rounding))


def _packs(part: Any) -> bool:
    """Whether the part has codes with a codec; packed sparse codes are stored with zeros between them."""
    scheme = part.scheme
    if part.kind == "sparse":
        scheme = scheme.values
        if scheme.kind != "codes" or scheme.float_zeros or not scheme.grid.has_zero:
            return False
    elif part.kind != "codes" or part.lattice != part.shape:
        return False
    size = scheme.group_size
    return scheme.grid.bits <= 8 and (not isinstance(size, int) or size <= LONGEST_GROUP)


def _rounds(part: Any, rounding: Any) -> bool:
    """Whether activations are quantized to integers without zero points, for integer codes, in their groups."""
    scheme = rounding.scheme
    if not (hasattr(scheme.grid, "lowest") and scheme.grid.plain and scheme.symmetric) or scheme.groups:
        return False
    if scheme.scale == "group" and (part.kind != "codes" or input_group(part) != scheme.group):
        return False
    return takes_integers(part.scheme)


def takes_integers(scheme: Any) -> bool:
    """Whether the weights of a part or a layer are integers, with or without an offset."""
    return bool(scheme.grids) and all(_whole(grid) for grid in scheme.grids)


def _whole(grid: Any) -> bool:
    if hasattr(grid, "lowest") or grid.offset:
        return True
    even = _even(grid)
    return even is not None and (even[0] / even[1]).is_integer()


@cache
def _even(grid: Any) -> tuple[float, float] | None:
    """Return (value of the first code, step) of a grid of up to 4 bits with equal steps; None for other grids."""
    if grid.bits > 4:
        return None
    values = _values(grid).unique_consecutive().tolist()  # the last one is repeated
    steps = {following - previous for previous, following in itertools.pairwise(values)}
    return (values[0], steps.pop()) if len(steps) == 1 else None


def input_group(part: Any) -> int | None:
    """Return the group size of activation quantization for a weight of codes: its own group size; None: whole rows."""
    size, width = part.scheme.group_size, part.shape[1]
    return size if isinstance(size, int) and not (size % HALF or width % size or part.scheme.indexed) else None


def _mode(rounding: Any) -> Mode:
    """Encode an activation quantizer as (mode, bits, clip)."""
    if rounding is None:
        return UNROUNDED
    scheme = rounding.scheme
    return TO_INTEGERS_GROUPS if scheme.scale == "group" else TO_INTEGERS, scheme.grid.bits, scheme.clip


def pack(part: Any) -> PackedCodes:
    """Convert a part to the layout of the kernel."""
    native = library()
    assert native is not None
    values = part.values if part.kind == "sparse" else part
    grid, (rows, width) = values.grid, part.shape
    integers = hasattr(grid, "lowest")
    codec = CODECS[grid.bits] if integers or grid.offset or grid.bits <= 4 else FLOATS[grid.dtype]
    scale = values.scales()
    group, order, columns = _columns(width, values.group_size, values.group_index, scale.shape[1])
    groups, zero = -(-columns // group), None
    if values.zero is not None:
        zero = _tiled(-values.zeros() / scale if grid.offset else values.zero.float() - grid.lowest, rows, groups)
    table, zero_point = None, float(-grid.lowest) if integers else 0.0
    if not integers and not grid.offset and grid.bits <= 4:
        even_levels = _even(grid)
        if even_levels is None:
            table = _values(grid)
        else:  # integers are decoded faster
            first_value, step = even_levels
            scale, zero_point = scale.float() * step, -first_value / step
    tiles = -(-rows // LANES)
    words = PAGES.empty(tiles, columns // UNIT, codec if codec <= 4 else 8, LANES, dtype=torch.int32)
    scale = _tiled(scale, rows, groups)
    sizes = codec, rows, width, group
    packed = PackedCodes(words, scale, zero, table, order, None, None, zero_point, *sizes, part.narrow_inputs)
    codes = _unsigned(part)
    status = native.compress_pack(packed.address, codes.data_ptr(), words.data_ptr(), torch.get_num_threads())
    check_status(status, f"codes {rows} x {width} in groups of {group} do not fit the kernel")
    native.compress_release(values.words.data_ptr(), values.words.nbytes)  # a mapped checkpoint is not in memory twice
    return packed


def _values(grid: Any) -> Tensor:
    """Return the number of each code of a grid without integers; codes without a level repeat the last one."""
    count = len(getattr(grid, "levels", ())) or 2**grid.bits
    return grid.decode(torch.arange(2**grid.bits).clamp(max=count - 1), torch.ones(()), None).float().contiguous()


def _unsigned(part: Any) -> Tensor:
    """Return the codes [out, in], counted from 0, as bytes."""
    if part.kind != "sparse":
        quantized = part.codes()
        return (quantized.codes.to(torch.int16) - quantized.grid.lowest_stored).to(torch.uint8).contiguous()
    values, grid = part.values, part.values.grid
    if not hasattr(grid, "lowest"):
        codes = torch.full(part.shape, int((_values(grid) == 0).nonzero()[0]), dtype=torch.uint8)
    elif values.zero is None:
        codes = torch.full(part.shape, -grid.lowest, dtype=torch.uint8)
    else:
        codes = values.spread(values.zero.to(torch.int16) - grid.lowest).expand(part.shape).to(torch.uint8).contiguous()
    for kept in part.kept.parts():
        kept.write(values.kept_codes(kept).to(torch.uint8), codes[kept.rows])
    return codes


def _columns(width: int, size: Any, index: Tensor | None, count: int) -> tuple[int, Tensor | None, int]:
    """Return the layout of columns in groups of a multiple of 16 columns.

    Groups that are not runs of a multiple of 16 columns are gathered, each padded to such a multiple.

    Args:
        width: number of columns.
        size: columns per group, 'channel' or 'tensor'.
        index: the group of each column, or None.
        count: number of groups.

    Returns:
        (columns per group, column of x for each packed column or None, packed columns).
    """
    padded_width = -(-width // UNIT) * UNIT
    if index is None:
        if not isinstance(size, int):
            return min(max(padded_width, UNIT), LONGEST_GROUP), None, padded_width
        if size % HALF == 0:
            return size, None, padded_width
        index = torch.arange(width) // size
    counts = index.long().bincount(minlength=count)
    group = -(-int(counts.max()) // HALF) * HALF
    sorted_columns = index.long().argsort(stable=True)
    starts = counts.cumsum(0) - counts
    group_of = index.long()[sorted_columns]
    position = group_of * group + torch.arange(width) - starts[group_of]
    columns = -(-len(counts) * group // UNIT) * UNIT
    order = torch.full((columns,), -1, dtype=torch.int32)
    order[position] = sorted_columns.to(torch.int32)
    return group, order, columns


def _tiled(values: Tensor, rows: int, groups: int) -> Tensor:
    """Arrange values per scale [out or 1, stored groups] as [tiles, groups, 16], `narrowed`, padded by zeros."""
    padded = torch.zeros(-(-rows // LANES) * LANES, groups)
    source = torch.arange(groups).clamp(max=values.shape[1] - 1)
    padded[:rows] = values.float().expand(rows, -1)[:, source]
    stored = narrowed(padded)
    return PAGES.empty(len(padded) // LANES, groups, LANES, dtype=stored.dtype).copy_(stored.view(-1, LANES, groups).mT)


def product(
    x: Tensor,
    packed: PackedCodes,
    bias: Tensor | None,
    mode: Mode = UNROUNDED,
    scale: Tensor | None = None,
    threshold: float | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """Compute x W^T + bias.

    Args:
        x: inputs.
        packed: the weight.
        bias: bias, or None.
        mode: activation quantization.
        scale: static scale of x, or None.
        threshold: columns of x with a magnitude of at least this are multiplied as floats (LLM.int8, Dettmers 2022,
            section 3.2).
        columns: bool [in], columns that are always multiplied as floats.

    Raises:
        MemoryError: if the buffers do not fit into memory.
    """
    native, rows, dense_rows, outliers = library(), x, x, None
    assert native is not None
    if not x.is_contiguous():
        rows = x.reshape(-1, packed.width)
        dense_rows = rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if threshold is not None or columns is not None:
        rows = rows.view(-1, packed.width) if rows is x else rows
        outliers = _outliers(rows, threshold, columns)
        dense_rows = rows if outliers is None else rows.index_fill(1, outliers, 0)
    y = x.new_empty((*x.shape[:-1], packed.rows))
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
        bias = bias.to(x.dtype).contiguous()
    static = None if scale is None else scale.float()
    rounded, bits, clip = rounding_of(packed, mode)
    status = native.compress_product(
        packed.address,
        dense_rows.data_ptr(),
        y.data_ptr(),
        pointer(bias),
        pointer(static),
        x.numel() // packed.width,
        packed.width if dense_rows is x else dense_rows.stride(0),
        TYPES[x.dtype],
        rounded,
        bits,
        clip,
        torch.get_num_threads(),
    )
    check_status(status, "sizes of a packed weight do not fit together")
    if outliers is not None:
        y += (rows[:, outliers] @ packed.columns(outliers).to(x.dtype).T).view_as(y)
    return y


def rounding_of(packed: PackedCodes, mode: Mode) -> Mode:
    """Replace unquantized inputs in a mode by bfloat16 ones if the weight or torch's settings allow it."""
    narrow = packed.narrow or torch.get_float32_matmul_precision() == "medium"
    return mode[0] or (TO_BF16 if narrow else UNQUANTIZED), *mode[1:]


def products(x: Tensor, weights: Sequence[PackedCodes], biases: Sequence[Tensor | None], mode: Mode) -> list[Tensor]:
    """Compute x W^T + bias for several weights, prepared once.

    Args:
        x: contiguous inputs.
        weights: the weights.
        biases: biases in the dtype of x, or None.
        mode: activation quantization.
    """
    native = library()
    assert native is not None
    outputs = [x.new_empty((*x.shape[:-1], weight.rows)) for weight in weights]
    pointers = ctypes.c_void_p * len(weights)
    rounded, bits, clip = rounding_of(weights[0], mode)
    status = native.compress_products(
        len(weights),
        pointers(*[w.address for w in weights]),
        x.data_ptr(),
        pointers(*[y.data_ptr() for y in outputs]),
        pointers(*map(pointer, biases)),
        None,
        x.numel() // weights[0].width,
        weights[0].width,
        TYPES[x.dtype],
        rounded,
        bits,
        clip,
        torch.get_num_threads(),
    )
    check_status(status, "sizes of packed weights do not fit together")
    return outputs


def _outliers(x: Tensor, threshold: float | None, columns: Tensor | None) -> Tensor | None:
    """Return the indexes of columns that are multiplied as floats; None if there are none."""
    if threshold is not None:
        large = (x.abs() >= threshold).any(0)
        columns = large if columns is None else columns | large
    if columns is None or not bool(columns.any()):
        return None
    return columns.nonzero()[:, 0]


_LIBRARY = torch.library.Library("compress", "DEF")
_LIBRARY.define(
    "codes_linear(Tensor x, Tensor? bias, int rounded, int bits, float clip, Tensor? input_scale, "
    "float? threshold, Tensor? columns, Tensor words, Tensor scale, Tensor? zero, Tensor? table, Tensor? order, "
    "Tensor? masks, Tensor? offsets, float zero_point, int codec, int rows, int width, int group, bool narrow, "
    "int[] tiles) -> Tensor"
)


def _codes_linear(
    x: Tensor,
    bias: Tensor | None,
    rounded: int,
    bits: int,
    clip: float,
    input_scale: Tensor | None,
    threshold: float | None,
    columns: Tensor | None,
    *weight: Any,
) -> Tensor:
    return product(x, PackedCodes(*weight), bias, (rounded, bits, clip), input_scale, threshold, columns)


def _shape_of_codes_linear(x: Tensor, *operands: Any) -> Tensor:
    rows = operands[-5]
    return x.new_empty(*x.shape[:-1], rows)


_LIBRARY.impl("codes_linear", _codes_linear, "CPU")
torch.library.register_fake("compress::codes_linear", _shape_of_codes_linear, lib=_LIBRARY)

# The same with a handle for the weight: torch.compile checks one number per layer, not all its tensors.
_LIBRARY.define(
    "packed_linear(Tensor x, Tensor? bias, int handle, int rows, int rounded, int bits, float clip) -> Tensor"
)
_PACKED: weakref.WeakValueDictionary[int, PackedCodes] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def handle_of(packed: PackedCodes) -> int:
    """Return a number that identifies a packed weight in this process while the weight is in memory."""
    handle = next(_numbers)
    _PACKED[handle] = packed
    return handle


def packed_of(handle: int) -> PackedCodes:
    """Return the packed weight of a handle."""
    return _PACKED[handle]


def _packed_linear(
    x: Tensor, bias: Tensor | None, handle: int, rows: int, rounded: int, bits: int, clip: float
) -> Tensor:
    return product(x, _PACKED[handle], bias, (rounded, bits, clip))


def _shape_of_packed_linear(x: Tensor, bias: Tensor | None, handle: int, rows: int, *mode: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


_LIBRARY.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("compress::packed_linear", _shape_of_packed_linear, lib=_LIBRARY)


def linear(
    x: Tensor,
    packed: PackedCodes,
    bias: Tensor | None,
    mode: Mode = UNROUNDED,
    scale: Tensor | None = None,
    threshold: float | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """Compute `product`, as the operator if torch traces."""
    inputs = scale, threshold, columns
    if as_operators():
        return torch.ops.compress.codes_linear(x, bias, *mode, *inputs, *packed.tensors, *packed.numbers)
    return product(x, packed, bias, mode, *inputs)
