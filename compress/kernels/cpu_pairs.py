"""Outlier-victim pairs on the CPU: a byte is a pair of codes, and an index into a table of the 256 pairs of values."""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from compress.kernels.contract import Part, RoundingLike
from compress.kernels.cpu.codes import HALF, PackedKernel, reads
from compress.kernels.cpu.packed import PackedCodes, of_bytes
from compress.kernels.cpu_lookup import LOOKED_UP
from compress.numerics.quant.pairs import decode


class PairsKernel(PackedKernel):
    """Pairs times float32 or bfloat16 inputs."""

    def supports(self, part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
        if part.kind != "pairs" or not reads(x, rounding):
            return False
        size = part.scheme.group_size
        return not (isinstance(size, int) and size % HALF)

    def prepare(self, part: Part) -> PackedCodes:
        return pack(part)


@cache
def values() -> Float[Tensor, "1 1 256 2"]:
    """The values of each byte: the first code is in the lower half."""
    with torch.inference_mode(False):
        bytes_of_pairs = torch.arange(256, device="cpu")
        codes = torch.stack([bytes_of_pairs % 16, bytes_of_pairs // 16], dim=1)
        return decode(codes, torch.float32).view(1, 1, 256, 2)


def pack(part: Part) -> PackedCodes:
    """Describe a part to the kernels; its codes are shared, not copied."""
    held, size = part.tensors(), part.scheme.group_size
    words = held["packed"].contiguous().view(torch.uint8)
    group = size if isinstance(size, int) else None
    return of_bytes(LOOKED_UP, words, values(), held["scale"], part.shape, part.narrow_inputs, group)


KERNEL = PairsKernel()
