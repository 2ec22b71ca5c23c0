"""Parts whose rows are rotated, on the CPU: the outputs of the kernel of their values, rotated back."""

from __future__ import annotations

from torch import Tensor

from compress.kernels.contract import PartLike, RoundingLike
from compress.kernels.cpu.codes import linear, reads
from compress.kernels.cpu.kinds import codec_of, pack, rotated_rows
from compress.kernels.cpu.packed import PackedCodes
from compress.kernels.cpu.rotations import has_steps, rotated


class RotatedKernel:
    """x W^T = (x P^T) H^T diag(signs), with P the values times their scales."""

    def supports(self, part: PartLike, x: Tensor, rounding: RoundingLike | None) -> bool:
        if codec_of(part) is None or (order := rotated_rows(part)) is None:
            return False
        return reads(x, rounding) and has_steps(order)

    def prepare(self, part: PartLike) -> PackedCodes:
        return pack(part)

    def product(
        self, x: Tensor, part: PartLike, prepared: PackedCodes, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        y = linear(x.float(), prepared, None)  # outputs are rounded to bfloat16 once, after the rotation
        return rotated(y, part.tensors()["signs"], part.scheme.rotated, True, bias, x.dtype)


KERNEL = RotatedKernel()
