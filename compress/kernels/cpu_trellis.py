"""Walks through a trellis on the CPU (QTIP): states are read from the stored bits, and their values computed."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compress.kernels.contract import Part, RoundingLike
from compress.kernels.cpu.codes import PackedKernel, reads
from compress.kernels.cpu.packed import PackedCodes, of_bytes
from compress.numerics.quant.gaussian_codes import DEVIATION, length_of

WALKS = {"1mad": 19, "3inst": 20, "hyb": 21}  # compress_codec of compress_cpu.h, by codes of values
STEPS = {"1mad": 1 / DEVIATION}  # what the numbers of a codec are multiplied by, if not by 1


class TrellisKernel(PackedKernel):
    """Walks times float32 or bfloat16 inputs. Rotated rows are those of another kernel."""

    def supports(self, part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
        return part.kind == "trellis" and part.scheme.rotated is None and takes(part, x, rounding)

    def prepare(self, part: Part) -> PackedCodes:
        return pack(part)


def takes(part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
    """Whether the products of walks have a kernel for these inputs. The weights of a state are of one row of a tile."""
    code, columns = part.scheme.code, part.scheme.tile_columns
    return code in WALKS and columns % length_of(code) == 0 and reads(x, rounding)


def pack(part: Part) -> PackedCodes:
    """Describe a part to the kernels; its codes are shared, not copied."""
    held, scheme = part.tensors(), part.scheme
    table = held.get("table")
    scale = held["scale"].float()[:, None] * STEPS.get(scheme.code, 1)
    return of_bytes(
        WALKS[scheme.code],
        held["codes"].contiguous(),
        None if table is None else signed(table),
        scale,
        part.shape,
        part.narrow_inputs,
        tiles=(scheme.trellis.step_bits, scheme.states, scheme.tile_rows, scheme.tile_columns),
    )


def signed(table: Float[Tensor, "entries 2"]) -> Float[Tensor, "1 1 entries*2 2"]:
    """The pairs of hyb, and after them those with the other sign of the second value."""
    table = table.float()
    return torch.cat([table, table * table.new_tensor([1, -1])])[None, None].contiguous()


KERNEL = TrellisKernel()
