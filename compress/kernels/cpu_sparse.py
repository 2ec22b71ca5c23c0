"""Kept weights alone that are floats, on the CPU; they are read at their stored size.

Their positions are a mask per column of 16 rows: half of the weights in bfloat16 take 9 bits a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.kernels.contract import Part, RoundingLike
from compress.kernels.cpu.codes import PackedKernel, reads
from compress.kernels.cpu.packed import UNIT, PackedCodes
from compress.native.library import LANES, library
from compress.native.pages import PAGES

KEPT_F32, KEPT_BF16 = 11, 12  # compress_codec of compress_cpu.h
TILES = 64  # that are packed at a time, to limit memory


class SparseKernel(PackedKernel):
    """Kept floats times float32 or bfloat16 inputs."""

    def supports(self, part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
        return part.kind == "sparse" and part.scheme.values.kind == "dense" and reads(x, rounding)

    def prepare(self, part: Part) -> PackedCodes:
        return pack(part)


def pack(part: Any) -> PackedCodes:
    """Convert a part to the layout of the kernel; other floats than bfloat16 become float32."""
    native, (rows, width) = library(), part.shape
    assert native is not None
    codec, dtype = (KEPT_BF16, torch.bfloat16) if part.dtype is torch.bfloat16 else (KEPT_F32, torch.float32)
    tiles, columns = -(-rows // LANES), -(-width // UNIT) * UNIT
    dense, mask = part.dense(dtype), part.kept.mask()
    bits = 1 << torch.arange(LANES, dtype=torch.int32)
    masks, values, counts = torch.zeros(tiles, columns, dtype=torch.int16), [], []
    for first in range(0, tiles, TILES):
        some = slice(first * LANES, (first + TILES) * LANES)
        kept = _tiles(mask[some])  # [tiles, in, 16]
        values.append(_tiles(dense[some])[kept])
        counts.append(kept.sum((1, 2)))
        masks[first : first + TILES, :width] = (kept * bits).sum(-1, dtype=torch.int32).to(torch.int16)
    each = torch.cat(counts)
    words = PAGES.empty(int(each.sum()) + LANES, dtype=dtype)
    torch.cat([*values, torch.zeros(LANES, dtype=dtype)], out=words)  # zeros: whole vectors are read
    offsets, sizes = each.cumsum(0) - each, (codec, rows, width, columns)
    scale = torch.ones(tiles, 1, LANES)
    packed = PackedCodes(words, scale, None, None, None, masks, offsets, 0.0, *sizes, part.narrow_inputs)
    for tensor in part.values.tensors().values():
        native.compress_release(tensor.data_ptr(), tensor.nbytes)  # a mapped checkpoint is not in memory twice
    return packed


def _tiles(rows: Tensor) -> Tensor:
    """Rows [n, in] as [tiles, in, 16], with zeros where there is no row."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % LANES))
    return padded.unflatten(0, (-1, LANES)).mT


KERNEL = SparseKernel()
