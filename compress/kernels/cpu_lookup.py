"""Weights that are looked up in codebooks, on the CPU: one index for each run of weights and book.

Indexes of 4 and 8 bits are read where they are stored; those of other widths take 4 or 8 bits in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.kernels.contract import Part, RoundingLike
from compress.kernels.cpu.codes import PackedKernel, reads
from compress.kernels.cpu.packed import PackedCodes, of_bytes

LOOKED_UP = 15  # compress_codec of compress_cpu.h
LENGTHS = 1, 2, 4, 8, 16  # weights of a run
FEW = 16  # entries whose indexes take half a byte, with runs of one weight


class LookupKernel(PackedKernel):
    """Entries of codebooks times float32 or bfloat16 inputs."""

    def supports(self, part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
        return part.kind == "codebook" and part.scheme.length in LENGTHS and reads(x, rounding)

    def prepare(self, part: Part) -> PackedCodes:
        return pack(part)


def pack(part: Any) -> PackedCodes:
    """Describe a part to the kernels. Indexes of 4 and 8 bits are shared, not copied; books become float32."""
    scheme = part.scheme
    books, halves = part.books.float().contiguous(), scheme.length == scheme.count == 1 and scheme.bits <= 4
    if halves and scheme.bits < 4:  # the missing entries have no index
        books = torch.nn.functional.pad(books, (0, 0, 0, FEW - books.shape[2]))
    if scheme.bits == (4 if halves else 8) and part.words.is_contiguous():
        words = part.words.view(torch.uint8)
    else:
        words = _bytes(part.indices.flatten(1), halves)
    scale = None if part.scale is None else part.scale[:, None]
    return of_bytes(LOOKED_UP, words, books, scale, part.shape, part.narrow_inputs)


def _bytes(indices: Tensor, halves: bool) -> Tensor:
    """The indexes [out, n] in bytes, or two in a byte, the first in the lower half."""
    indices = indices.to(torch.uint8)
    if not halves:
        return indices.contiguous()
    first, second = torch.nn.functional.pad(indices, (0, indices.shape[1] % 2)).unflatten(1, (-1, 2)).unbind(-1)
    return first | second << 4


KERNEL = LookupKernel()
