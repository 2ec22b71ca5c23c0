"""Parts of the kinds of `cpu.kinds` times float32 or bfloat16 inputs, on the CPU."""

from __future__ import annotations

from torch import Tensor

from compress.kernels.contract import PartLike, RoundingLike
from compress.kernels.cpu.codes import PackedKernel, reads
from compress.kernels.cpu.kinds import codec_of, pack, rotated_rows
from compress.kernels.cpu.packed import PackedCodes


class KindsKernel(PackedKernel):
    """Products of all kinds of a table. Parts with rotated rows are those of another kernel."""

    def supports(self, part: PartLike, x: Tensor, rounding: RoundingLike | None) -> bool:
        return codec_of(part) is not None and rotated_rows(part) is None and reads(x, rounding)

    def prepare(self, part: PartLike) -> PackedCodes:
        return pack(part)


KERNEL = KindsKernel()
