"""Kinds of parts that the library multiplies in one layout each: their codec, and how their tensors are packed.

Weights are read where they are stored whenever the library can read that form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from compress.kernels.contract import PartLike
from compress.kernels.cpu.codes import HALF
from compress.kernels.cpu.packed import UNIT, PackedCodes, of_bytes
from compress.native.library import LANES, library
from compress.native.pages import PAGES
from compress.numerics.quant import bits, lattice, pairs
from compress.numerics.quant.gaussian_codes import DEVIATION, length_of

# compress_codec of compress_cpu.h
SPARSE = {torch.float32: 11, torch.bfloat16: 12}
LOOKUP = 15
LATTICE = {2: 16, 3: 17, 4: 18}  # by bits per weight
TRELLIS = {"1mad": 19, "3inst": 20, "hyb": 21}
POSITIONS = {torch.float32: 22, torch.bfloat16: 23}

RUN_LENGTHS = 1, 2, 4, 8, 16  # weights of a codebook entry
NIBBLE_ENTRIES = 16  # codebook entries whose indexes take half a byte, with runs of one weight
LATTICE_ENTRIES, LATTICE_STEP = 256, 16.0  # entries of a lattice table, and the factor of its numbers
TRELLIS_STEPS = {"1mad": 1 / DEVIATION}  # factor of the values of a code, if not 1
TILES_AT_ONCE = 64  # tiles of sparse floats that are packed at once, to limit memory


class PackedKind(NamedTuple):
    """How the library multiplies a kind of parts.

    Attributes:
        codec: returns the codec of a part (compress_codec of compress_cpu.h), or None if the library cannot read it.
        pack: describes the part to the library, for this codec.
    """

    codec: Callable[[Any], int | None]
    pack: Callable[[Any, int], PackedCodes]


def codec_of(part: PartLike) -> int | None:
    """Return the codec of a part; None if the table does not list its kind or the library cannot read it."""
    return KINDS[part.kind].codec(part) if part.kind in KINDS else None


def pack(part: PartLike) -> PackedCodes:
    """Describe a part, whose codec is not None, to the library."""
    codec = codec_of(part)
    assert codec is not None
    return KINDS[part.kind].pack(part, codec)


def rotated_rows(part: PartLike) -> int | None:
    """Return the order of the Hadamard matrix that rotates the rows of a part; None if rows are not rotated."""
    return getattr(part.scheme, "rotated", None)


# Codebooks: one index for each run of weights and codebook


def _codebook_codec(part: Any) -> int | None:
    return LOOKUP if part.scheme.length in RUN_LENGTHS else None


def _pack_codebook(part: Any, codec: int) -> PackedCodes:
    """Share indexes of 4 and 8 bits; store other widths in 4 or 8 bits. Codebooks become float32."""
    scheme = part.scheme
    books, in_nibbles = part.books.float().contiguous(), scheme.length == scheme.count == 1 and scheme.bits <= 4
    if in_nibbles and scheme.bits < 4:  # the missing entries have no index
        books = torch.nn.functional.pad(books, (0, 0, 0, NIBBLE_ENTRIES - books.shape[2]))
    if scheme.bits == (4 if in_nibbles else 8) and part.words.is_contiguous():
        words = part.words.view(torch.uint8)
    else:
        words = _index_bytes(part.indices.flatten(1), in_nibbles)
    scale = None if part.scale is None else part.scale[:, None]
    return of_bytes(codec, words, books, scale, part.shape, part.narrow_inputs)


def _index_bytes(indices: Tensor, in_nibbles: bool) -> Tensor:
    """Return the indexes [out, n] as bytes, or two per byte, the first one in the lower half."""
    indices = indices.to(torch.uint8)
    if not in_nibbles:
        return indices.contiguous()
    low, high = torch.nn.functional.pad(indices, (0, indices.shape[1] % 2)).unflatten(1, (-1, 2)).unbind(-1)
    return low | high << 4


# Points of a lattice (QuIP#): two tables and an exclusive or decode eight weights


def _lattice_codec(part: Any) -> int | None:
    return LATTICE.get(part.scheme.bits)


def _pack_lattice(part: Any, codec: int) -> PackedCodes:
    """Share the codes."""
    tensors = part.tensors()
    if part.shape[1] % lattice.LENGTH:
        raise ValueError(f"{part.shape[1]} inputs are no multiple of {lattice.LENGTH}")
    scale = tensors["scale"].float()[:, None] * LATTICE_STEP
    table = lattice_tables(part.scheme.bits)
    return of_bytes(codec, tensors["codes"].contiguous(), table, scale, part.shape, part.narrow_inputs)


@cache
def lattice_tables(bits: int) -> Float[Tensor, "1 tables 256 8"]:
    """Return what `Points` of lookup.inc reads: tables of the first byte, of the second byte, and of added points.

    A point p is stored as the float 3/2 + p / 16. The first table contains the points without minus signs among the
    seven stored ones and with the shift 1/4. The second one contains the bits that other signs and the other shift
    change, which are the same for every first byte. With 3 bits the points of E8 are added, with 4 bits another point
    of E8P times a factor, which is every number of the third table.
    """
    with torch.inference_mode(False):
        indexes = torch.arange(LATTICE_ENTRIES, dtype=torch.uint8, device="cpu")
        zeros = torch.zeros(LATTICE_ENTRIES, dtype=torch.uint8)
        points = _shifted_points(torch.stack([indexes, zeros], dim=1))
        negated = _shifted_points(torch.stack([zeros, indexes], dim=1))
        sign_bits = negated.view(torch.int32) ^ points[0].view(torch.int32)
        tables = [points, sign_bits.view(torch.float32)]
        if bits == 3:
            tables.append(lattice.roots() * (lattice.STAGES[bits][1][1] / LATTICE_STEP))
        elif bits == 4:
            tables.append(torch.full_like(points, lattice.STAGES[bits][1][1]))
        return torch.stack(tables)[None].contiguous()


def _shifted_points(codes: Tensor) -> Float[Tensor, "n 8"]:
    """Return 3/2 + p / 16 for points p of E8P."""
    return lattice.decode(codes, 2) / LATTICE_STEP + 1.5


# Single weights as floats, in compressed sparse rows; a NaN in an input reaches outputs with a weight in its column


def _positions_codec(part: Any) -> int | None:
    if part.scheme.by != "position" or part.scheme.count == 0:
        return None
    return POSITIONS.get(part.values.dtype, POSITIONS[torch.float32])


def _pack_positions(part: Any, codec: int) -> PackedCodes:
    """Share values and columns; float16 values become float32.

    Raises:
        ValueError: if a damaged part contains columns or rows that the layer does not have.
    """
    part.validate("weight")
    (rows, width), values = part.shape, part.values
    values = (values if values.dtype in POSITIONS else values.float()).contiguous()
    columns = -(-width // UNIT) * UNIT
    scale, sizes = torch.ones(-(-rows // LANES), 1, LANES), (codec, rows, width, columns)
    order, offsets = part.columns.contiguous(), part.rows.long()
    return PackedCodes(values[None], scale, None, None, order, None, offsets, 0.0, *sizes, part.narrow_inputs)


# Outlier-victim pairs: a byte is a pair of codes, and an index into a table of the 256 pairs of values


def _pairs_codec(part: Any) -> int | None:
    size = part.scheme.group_size
    return None if isinstance(size, int) and size % HALF else LOOKUP


def _pack_pairs(part: Any, codec: int) -> PackedCodes:
    """Share the codes."""
    tensors, size = part.tensors(), part.scheme.group_size
    words = tensors["packed"].contiguous().view(torch.uint8)
    group = size if isinstance(size, int) else None
    return of_bytes(codec, words, pair_values(), tensors["scale"], part.shape, part.narrow_inputs, group)


@cache
def pair_values() -> Float[Tensor, "1 1 256 2"]:
    """Return the values of each byte; the first code is in the lower half."""
    with torch.inference_mode(False):
        bytes_of_pairs = torch.arange(256, device="cpu")
        codes = torch.stack([bytes_of_pairs % 16, bytes_of_pairs // 16], dim=1)
        return pairs.decode(codes, torch.float32).view(1, 1, 256, 2)


# Packed sparse floats: a mask per column of 16 rows, so half of the weights in bfloat16 take 9 bits per weight


def _sparse_codec(part: Any) -> int | None:
    if part.scheme.values.kind != "dense":
        return None
    return SPARSE[torch.bfloat16 if part.dtype is torch.bfloat16 else torch.float32]


def _pack_sparse(part: Any, codec: int) -> PackedCodes:
    """Convert the values to the layout of the library; dtypes other than bfloat16 become float32."""
    native, (rows, width) = library(), part.shape
    assert native is not None
    dtype = torch.bfloat16 if codec == SPARSE[torch.bfloat16] else torch.float32
    tiles, columns = -(-rows // LANES), -(-width // UNIT) * UNIT
    dense, mask = part.dense(dtype), part.kept.mask()
    masks, values, counts = torch.zeros(tiles, columns, dtype=torch.int16), [], []
    for start in range(0, tiles, TILES_AT_ONCE):
        part_rows = slice(start * LANES, (start + TILES_AT_ONCE) * LANES)
        tile_mask = _row_tiles(mask[part_rows]).flatten(1)  # [tiles, in * 16]
        values.append(_row_tiles(dense[part_rows]).flatten()[tile_mask.flatten()])
        counts.append(tile_mask.view(torch.uint8).sum(1))
        masks[start : start + TILES_AT_ONCE, :width] = bits.pack(tile_mask, 1).view(torch.int16)[:, :width]
    sizes = torch.cat(counts)
    words = PAGES.empty(int(sizes.sum()) + LANES, dtype=dtype)
    torch.cat([*values, torch.zeros(LANES, dtype=dtype)], out=words)  # zeros, since whole vectors are read
    offsets, scale = sizes.cumsum(0) - sizes, torch.ones(tiles, 1, LANES)
    shape = codec, rows, width, columns
    packed = PackedCodes(words, scale, None, None, None, masks, offsets, 0.0, *shape, part.narrow_inputs)
    for tensor in part.values.tensors().values():
        native.compress_release(tensor.data_ptr(), tensor.nbytes)  # a mapped checkpoint is not in memory twice
    return packed


def _row_tiles(rows: Tensor) -> Tensor:
    """Return rows [n, in] as [tiles, in, 16], with zeros after the last row."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % LANES))
    return padded.unflatten(0, (-1, LANES)).mT


# Trellis paths (QTIP): states are read from the stored bits, and their values computed


def _trellis_codec(part: Any) -> int | None:
    """Return the codec; the weights of a state must be in one row of a tile."""
    code = part.scheme.code
    return TRELLIS[code] if code in TRELLIS and part.scheme.tile_columns % length_of(code) == 0 else None


def _pack_trellis(part: Any, codec: int) -> PackedCodes:
    """Share the codes."""
    tensors, scheme = part.tensors(), part.scheme
    table = tensors.get("table")
    return of_bytes(
        codec,
        tensors["codes"].contiguous(),
        None if table is None else signed_pairs(table),
        tensors["scale"].float()[:, None] * TRELLIS_STEPS.get(scheme.code, 1),
        part.shape,
        part.narrow_inputs,
        tiles=(scheme.trellis.step_bits, scheme.states, scheme.tile_rows, scheme.tile_columns),
    )


def signed_pairs(table: Float[Tensor, "entries 2"]) -> Float[Tensor, "1 1 entries*2 2"]:
    """Return the pairs of hyb, then the same pairs with the other sign of the second value."""
    table = table.float()
    return torch.cat([table, table * table.new_tensor([1, -1])])[None, None].contiguous()


KINDS: dict[str, PackedKind] = {
    "codebook": PackedKind(_codebook_codec, _pack_codebook),
    "lattice": PackedKind(_lattice_codec, _pack_lattice),
    "outliers": PackedKind(_positions_codec, _pack_positions),
    "pairs": PackedKind(_pairs_codec, _pack_pairs),
    "sparse": PackedKind(_sparse_codec, _pack_sparse),
    "trellis": PackedKind(_trellis_codec, _pack_trellis),
}
"""Kind of a part -> (codec, pack)."""
