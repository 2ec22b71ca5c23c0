"""Single weights as floats, in compressed sparse rows, on the CPU; they are read where they are stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.kernels.contract import Part, RoundingLike
from compress.kernels.cpu.codes import PackedKernel, reads
from compress.kernels.cpu.packed import UNIT, PackedCodes
from compress.native.library import LANES

POSITIONS = {torch.float32: 22, torch.bfloat16: 23}  # compress_codec of compress_cpu.h


class PositionsKernel(PackedKernel):
    """Single weights times float32 or bfloat16 inputs.

    A NaN in an input reaches the outputs that have a weight for its column.
    """

    def supports(self, part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
        scheme = part.scheme
        return part.kind == "outliers" and scheme.by == "position" and scheme.count > 0 and reads(x, rounding)

    def prepare(self, part: Part) -> PackedCodes:
        return pack(part)


def pack(part: Any) -> PackedCodes:
    """Describe a part to the kernels; its values and columns are shared, not copied. float16 becomes float32.

    Raises ValueError for columns or rows that the layer does not have, which only a damaged part holds.
    """
    part.validate("weight")
    (rows, width), values = part.shape, part.values
    values = (values if values.dtype in POSITIONS else values.float()).contiguous()
    columns = -(-width // UNIT) * UNIT
    scale, sizes = torch.ones(-(-rows // LANES), 1, LANES), (POSITIONS[values.dtype], rows, width, columns)
    order, offsets = part.columns.contiguous(), part.rows.long()
    return PackedCodes(values[None], scale, None, None, order, None, offsets, 0.0, *sizes, part.narrow_inputs)


KERNEL = PositionsKernel()
