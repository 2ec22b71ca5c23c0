"""Parts whose rows are rotated, on the CPU: the outputs of the kernel of their values, rotated back."""

from __future__ import annotations

from torch import Tensor

from compress.kernels import cpu_lattice, cpu_trellis
from compress.kernels.contract import Part, RoundingLike
from compress.kernels.cpu.codes import linear
from compress.kernels.cpu.packed import PackedCodes
from compress.kernels.cpu.rotations import has_steps, rotated

VALUES = {"lattice": cpu_lattice, "trellis": cpu_trellis}
"""The files with the kernels of values, by the kinds of parts."""


class RotatedKernel:
    """x W^T = (x P^T) H^T diag(signs), with P the values times their scales."""

    def supports(self, part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
        if part.kind not in VALUES or part.scheme.rotated is None:
            return False
        return VALUES[part.kind].takes(part, x, rounding) and has_steps(part.scheme.rotated)

    def prepare(self, part: Part) -> PackedCodes:
        return VALUES[part.kind].pack(part)

    def product(
        self, x: Tensor, part: Part, prepared: PackedCodes, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        y = linear(x.float(), prepared, None)  # outputs are rounded to bfloat16 once, after the rotation
        return rotated(y, part.tensors()["signs"], part.scheme.rotated, True, bias, x.dtype)


KERNEL = RotatedKernel()
