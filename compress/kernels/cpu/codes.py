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

from compress.kernels.contract import Part, RoundingLike
from compress.kernels.cpu.packed import UNIT, PackedCodes, narrowed
from compress.kernels.recording import as_operators
from compress.native.library import LANES, OUT_OF_MEMORY, available, library, pointer
from compress.native.pages import PAGES

HALF = 16  # columns of which groups are whole multiples
TYPES = {torch.float32: 0, torch.bfloat16: 1}
CODECS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}  # by bits; codes of 5 to 7 bits take a byte
FLOATS = {torch.float8_e4m3fn: 9, torch.float8_e5m2: 10}
LONGEST_GROUP = 16384  # columns that are summed in int32: 255 * 128 * 16384 < 2^31
AS_THEY_ARE, TO_INTEGERS, TO_BF16, TO_INTEGERS_GROUPS = 0, 1, 2, 3  # compress_rounding of compress_cpu.h

Mode = tuple[int, int, float]
"""What inputs are rounded to: a compress_rounding, the bits of integers, and the share of a range that they cover."""

UNROUNDED: Mode = (AS_THEY_ARE, 8, 1.0)


def reads(x: Tensor, rounding: RoundingLike | None = None) -> bool:
    """Whether the library is there and reads these inputs: of its types, on the CPU, unrounded, without a gradient."""
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
        self, x: Tensor, part: Part, prepared: PackedCodes, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        """x W^T + bias, for kernels that take inputs as they are."""
        return linear(x, prepared, bias)


class CodesKernel(PackedKernel):
    """Codes times float32 or bfloat16 inputs, or integer codes times inputs rounded to integers, in integers."""

    def supports(self, part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
        if not reads(x) or not (part.is_prepared(self) or _packs(part)):
            return False
        return rounding is None or _rounds(part, rounding)

    def prepare(self, part: Part) -> PackedCodes:
        return pack(part)

    def product(
        self, x: Tensor, part: Part, prepared: PackedCodes, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        if rounding is None:
            return linear(x, prepared, bias)
        known: Any = rounding
        return linear(x, prepared, bias, _mode(rounding), known.scale, known.threshold, known.columns)

    def products(
        self, x: Tensor, parts: Sequence[Part], rounding: RoundingLike | None, biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        biases = [b if b is None or b.dtype == x.dtype else b.to(x.dtype) for b in biases]
        return products(x, [part.prepared(self) for part in parts], biases, _mode(rounding))


def _packs(part: Any) -> bool:
    """Whether the part holds codes that have a codec here; kept weights alone are packed with zeros between them."""
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
    """Whether inputs are rounded to integers without a zero point, for integer codes; if in groups, in theirs."""
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
    """(value of the first code, step) of a grid of up to 4 bits with steps of one size, such as ternary; else None."""
    if grid.bits > 4:
        return None
    values = _values(grid).unique_consecutive().tolist()  # the last one is repeated
    steps = {after - before for before, after in itertools.pairwise(values)}
    return (values[0], steps.pop()) if len(steps) == 1 else None


def input_group(part: Any) -> int | None:
    """The groups of columns that inputs are rounded in for a weight of codes: its own; None: whole rows."""
    size, width = part.scheme.group_size, part.shape[1]
    return size if isinstance(size, int) and not (size % HALF or width % size or part.scheme.indexed) else None


def _mode(rounding: Any) -> Mode:
    """What the kernel rounds inputs to."""
    if rounding is None:
        return UNROUNDED
    scheme = rounding.scheme
    return TO_INTEGERS_GROUPS if scheme.scale == "group" else TO_INTEGERS, scheme.grid.bits, scheme.clip


def pack(part: Any) -> PackedCodes:
    """Convert a part to the layout of the kernel."""
    native = library()
    assert native is not None
    held = part.values if part.kind == "sparse" else part
    grid, (rows, width) = held.grid, part.shape
    integers = hasattr(grid, "lowest")
    codec = CODECS[grid.bits] if integers or grid.offset or grid.bits <= 4 else FLOATS[grid.dtype]
    scale = held.scales()
    group, order, columns = _columns(width, held.group_size, held.group_index, scale.shape[1])
    groups, zero = -(-columns // group), None
    if held.zero is not None:
        zero = _tiled(-held.zeros() / scale if grid.offset else held.zero.float() - grid.lowest, rows, groups)
    table, point = None, float(-grid.lowest) if integers else 0.0
    if not integers and not grid.offset and grid.bits <= 4:
        even = _even(grid)
        if even is None:
            table = _values(grid)
        else:  # integers are decoded faster
            first, step = even
            scale, point = scale.float() * step, -first / step
    tiles = -(-rows // LANES)
    words = PAGES.empty(tiles, columns // UNIT, codec if codec <= 4 else 8, LANES, dtype=torch.int32)
    scale = _tiled(scale, rows, groups)
    sizes = codec, rows, width, group
    packed = PackedCodes(words, scale, zero, table, order, None, None, point, *sizes, part.narrow_inputs)
    codes = _unsigned(part)
    failed = native.compress_pack(packed.address, codes.data_ptr(), words.data_ptr(), torch.get_num_threads())
    assert not failed, f"codes {rows} x {width} in groups of {group} do not fit the kernel"
    native.compress_release(held.words.data_ptr(), held.words.nbytes)  # a mapped checkpoint is not in memory twice
    return packed


def _values(grid: Any) -> Tensor:
    """The number of each code of a grid that is no integer grid; codes without one repeat the last."""
    count = len(getattr(grid, "levels", ())) or 2**grid.bits
    return grid.decode(torch.arange(2**grid.bits).clamp(max=count - 1), torch.ones(()), None).float().contiguous()


def _unsigned(part: Any) -> Tensor:
    """The codes [out, in], counted from 0, as bytes."""
    if part.kind != "sparse":
        found = part.codes()
        return (found.codes.to(torch.int16) - found.grid.lowest_stored).to(torch.uint8).contiguous()
    held, grid = part.values, part.values.grid
    if not hasattr(grid, "lowest"):
        codes = torch.full(part.shape, int((_values(grid) == 0).nonzero()[0]), dtype=torch.uint8)
    elif held.zero is None:
        codes = torch.full(part.shape, -grid.lowest, dtype=torch.uint8)
    else:
        codes = held.spread(held.zero.to(torch.int16) - grid.lowest).expand(part.shape).to(torch.uint8).contiguous()
    for rows, mask, where in part.kept.parts():
        codes[rows] = codes[rows].masked_scatter(mask, held.kept_codes(rows, where).to(torch.uint8))
    return codes


def _columns(width: int, size: Any, index: Tensor | None, count: int) -> tuple[int, Tensor | None, int]:
    """(columns per group, column of x for each packed column or None, packed columns).

    size: columns per group, 'channel' or 'tensor'. index: the group of each column, or None. count: number of groups.
    Groups that are no runs of a multiple of 16 columns are gathered, each padded to such a multiple.
    """
    whole = -(-width // UNIT) * UNIT
    if index is None:
        if not isinstance(size, int):
            return min(max(whole, UNIT), LONGEST_GROUP), None, whole
        if size % HALF == 0:
            return size, None, whole
        index = torch.arange(width) // size
    counts = index.long().bincount(minlength=count)
    group = -(-int(counts.max()) // HALF) * HALF
    sorted_columns = index.long().argsort(stable=True)
    starts = counts.cumsum(0) - counts
    group_of = index.long()[sorted_columns]
    place = group_of * group + torch.arange(width) - starts[group_of]
    columns = -(-len(counts) * group // UNIT) * UNIT
    order = torch.full((columns,), -1, dtype=torch.int32)
    order[place] = sorted_columns.to(torch.int32)
    return group, order, columns


def _tiled(values: Tensor, rows: int, groups: int) -> Tensor:
    """Values per scale [out or 1, stored groups] as [tiles, groups, 16], `narrowed`; zeros where there is no row."""
    found = torch.zeros(-(-rows // LANES) * LANES, groups)
    source = torch.arange(groups).clamp(max=values.shape[1] - 1)
    found[:rows] = values.float().expand(rows, -1)[:, source]
    kept = narrowed(found)
    return PAGES.empty(len(found) // LANES, groups, LANES, dtype=kept.dtype).copy_(kept.view(-1, LANES, groups).mT)


def product(
    x: Tensor,
    packed: PackedCodes,
    bias: Tensor | None,
    mode: Mode = UNROUNDED,
    scale: Tensor | None = None,
    threshold: float | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """x W^T + bias. mode: what x is rounded to first.

    scale: static scale of x, or None. threshold, columns: columns of x with such a magnitude, and these columns (bool
    [in]), are multiplied as floats (LLM.int8, Dettmers 2022, section 3.2).
    """
    native, rows, inside, chosen = library(), x, x, None
    assert native is not None
    if not x.is_contiguous():
        rows = x.reshape(-1, packed.width)
        inside = rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if threshold is not None or columns is not None:
        rows = rows.view(-1, packed.width) if rows is x else rows
        chosen = _outliers(rows, threshold, columns)
        inside = rows if chosen is None else rows.index_fill(1, chosen, 0)
    y = x.new_empty((*x.shape[:-1], packed.rows))
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
        bias = bias.to(x.dtype).contiguous()
    static = None if scale is None else scale.float()
    rounded, bits, clip = rounding_of(packed, mode)
    failed = native.compress_product(
        packed.address,
        inside.data_ptr(),
        y.data_ptr(),
        pointer(bias),
        pointer(static),
        x.numel() // packed.width,
        packed.width if inside is x else inside.stride(0),
        TYPES[x.dtype],
        rounded,
        bits,
        clip,
        torch.get_num_threads(),
    )
    if failed == OUT_OF_MEMORY:
        raise MemoryError("the buffers of a kernel do not fit into memory")
    assert not failed, "sizes of a packed weight do not fit together"
    if chosen is not None:
        y += (rows[:, chosen] @ packed.columns(chosen).to(x.dtype).T).view_as(y)
    return y


def rounding_of(packed: PackedCodes, mode: Mode) -> Mode:
    """A mode with what a weight and torch's settings allow: bfloat16 for inputs that are taken as they are."""
    narrow = packed.narrow or torch.get_float32_matmul_precision() == "medium"
    return mode[0] or (TO_BF16 if narrow else AS_THEY_ARE), *mode[1:]


def products(x: Tensor, weights: Sequence[PackedCodes], biases: Sequence[Tensor | None], mode: Mode) -> list[Tensor]:
    """x W^T + bias for some weights, prepared once. x: contiguous. Biases: in its dtype."""
    native = library()
    assert native is not None
    found = [x.new_empty((*x.shape[:-1], weight.rows)) for weight in weights]
    many = ctypes.c_void_p * len(weights)
    rounded, bits, clip = rounding_of(weights[0], mode)
    failed = native.compress_products(
        len(weights),
        many(*[w.address for w in weights]),
        x.data_ptr(),
        many(*[y.data_ptr() for y in found]),
        many(*map(pointer, biases)),
        None,
        x.numel() // weights[0].width,
        weights[0].width,
        TYPES[x.dtype],
        rounded,
        bits,
        clip,
        torch.get_num_threads(),
    )
    if failed == OUT_OF_MEMORY:
        raise MemoryError("the buffers of a kernel do not fit into memory")
    assert not failed, "sizes of packed weights do not fit together"
    return found


def _outliers(x: Tensor, threshold: float | None, columns: Tensor | None) -> Tensor | None:
    """The indexes of columns that are multiplied as floats; None if there are none."""
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


def _shape_of_codes_linear(x: Tensor, *rest: Any) -> Tensor:
    rows = rest[-5]
    return x.new_empty(*x.shape[:-1], rows)


_LIBRARY.impl("codes_linear", _codes_linear, "CPU")
torch.library.register_fake("compress::codes_linear", _shape_of_codes_linear, lib=_LIBRARY)

# The same for a weight that a number stands for: torch.compile has one number to check per layer, not all its tensors.
_LIBRARY.define(
    "packed_linear(Tensor x, Tensor? bias, int handle, int rows, int rounded, int bits, float clip) -> Tensor"
)
_PACKED: weakref.WeakValueDictionary[int, PackedCodes] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def handle_of(packed: PackedCodes) -> int:
    """A number that stands for a packed weight in this process as long as the weight is in memory."""
    handle = next(_numbers)
    _PACKED[handle] = packed
    return handle


def packed_of(handle: int) -> PackedCodes:
    """The packed weight that a number stands for."""
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
    """`product`, as the operator where torch traces."""
    inputs = scale, threshold, columns
    if as_operators():
        return torch.ops.compress.codes_linear(x, bias, *mode, *inputs, *packed.tensors, *packed.numbers)
    return product(x, packed, bias, mode, *inputs)
