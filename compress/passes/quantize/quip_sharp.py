"""QuIP#: weights rotated by Hadamard matrices, and rounded to points of the lattice E8 run by run (Tseng 2024)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from compress.layers.parts.lattice import LatticeScheme
from compress.numerics.block_sweep import BlockSweep
from compress.numerics.quant.lattice import CHUNK, GAUSSIAN, LENGTH, count_bytes, decode, nearest
from compress.passes.contract.memory import ProblemSize
from compress.passes.families.rotated import GaussianCode, RotatedPass


class QuipSharp(RotatedPass):
    """Rotate weights and inputs by randomized Hadamard matrices, and round runs of eight weights to lattice points.

    The rotated weight has no outliers: it is nearly Gaussian (section 3), so one codebook suits all layers. At 2 bits
    it is E8P, 2^16 points in 8 dimensions (section 4.1). At 3 and 4 bits a second codebook rounds what the first one
    leaves (section 4.3).

    Runs are rounded from left to right, and later runs compensate each error (BlockLDLQ, section 4.2). `refine` then
    chooses each run again, given all others, and the scale of each row by least squares. The paper has one scale per
    layer, and no refinement.

    rotate: 'both' also rotates the outputs, as the paper does. With 'inputs' distill and lkd can learn the scales of
    the rows.
    """

    use_for: ClassVar[str] = "2 bits (2.04 with scales and signs) without a stored codebook. Follow it by distill."
    not_for: ClassVar[str] = (
        "The fastest decoding: a point takes longer to decode than integers, and inputs are rotated when a layer runs."
    )
    paper: ClassVar[str] = "https://arxiv.org/abs/2402.04396"

    bits: Literal[2, 3, 4] = Field(default=2, description="bits per weight: E8P; E8P and E8; E8P twice")
    refine: int = Field(
        default=2, ge=0, le=100, description="rounds after the sweep in which scales and runs are chosen again"
    )

    def scheme(self, rotated: int | None) -> LatticeScheme:
        return LatticeScheme(self.bits, rotated)

    def code_of(self, storage: torch.dtype, device: torch.device) -> GaussianCode:
        return GaussianCode(_Points(self.bits), GAUSSIAN[self.bits], {})

    def improve(self, sweep: BlockSweep) -> None:
        for _ in range(self.refine):
            sweep.fit_scales()
            sweep.descend()

    def memory(self, size: ProblemSize) -> int:
        distances = 2 * 4 * CHUNK * LENGTH * 256  # of some runs to all vectors of magnitudes
        return super().memory(size) + distances


class _Points:
    """Runs of eight weights of a row as points of the lattice."""

    rows, columns = 1, LENGTH

    def __init__(self, bits: int) -> None:
        self.bits, self.size = bits, count_bytes(bits)

    def encode(self, values: Float[Tensor, "out 8"]) -> Int[Tensor, "out bytes"]:
        return nearest(values, self.bits)

    def decode(self, codes: Int[Tensor, "out bytes"]) -> Float[Tensor, "out 8"]:
        return decode(codes, self.bits)
