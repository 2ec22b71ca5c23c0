"""Points of a lattice on the CPU (QuIP#): two tables and an exclusive or decode eight weights."""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from compress.kernels.contract import Part, RoundingLike
from compress.kernels.cpu.codes import PackedKernel, reads
from compress.kernels.cpu.packed import PackedCodes, of_bytes
from compress.numerics.quant.lattice import LENGTH, STAGES, decode, roots

POINTS = {2: 16, 3: 17, 4: 18}  # compress_codec of compress_cpu.h, by bits of a weight
ENTRIES, STEP = 256, 16.0  # entries of a table; what the numbers of tables are multiplied by


class LatticeKernel(PackedKernel):
    """Points times float32 or bfloat16 inputs. Rotated rows are those of another kernel."""

    def supports(self, part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
        return part.kind == "lattice" and part.scheme.rotated is None and takes(part, x, rounding)

    def prepare(self, part: Part) -> PackedCodes:
        return pack(part)


def takes(part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
    """Whether the products of a lattice have a kernel for these inputs."""
    return part.scheme.bits in POINTS and reads(x, rounding)


@cache
def tables(bits: int) -> Float[Tensor, "1 tables 256 8"]:
    """What `Points` of lookup.inc reads: for the first byte of a point, for the second one, and what is added.

    A point p stands as the float 3/2 + p / 16. The first table holds the points without minus signs among the seven
    stored ones and with the shift 1/4; the second one holds the bits that other signs and the other shift change, which
    are the same for every first byte. With 3 bits the points of E8 are added, with 4 bits another point of E8P times a
    factor, which is every number of the third table.
    """
    with torch.inference_mode(False):
        every, zeros = torch.arange(ENTRIES, dtype=torch.uint8, device="cpu"), torch.zeros(ENTRIES, dtype=torch.uint8)
        first = _places(torch.stack([every, zeros], dim=1))
        changed = _places(torch.stack([zeros, every], dim=1)).view(torch.int32) ^ first[0].view(torch.int32)
        found = [first, changed.view(torch.float32)]
        if bits == 3:
            found.append(roots() * (STAGES[bits][1][1] / STEP))
        elif bits == 4:
            found.append(torch.full_like(first, STAGES[bits][1][1]))
        return torch.stack(found)[None].contiguous()


def _places(codes: Tensor) -> Float[Tensor, "n 8"]:
    """3/2 + p / 16 of points p of E8P."""
    return decode(codes, 2) / STEP + 1.5


def pack(part: Part) -> PackedCodes:
    """Describe a part to the kernels; its codes are shared, not copied."""
    held, bits = part.tensors(), part.scheme.bits
    assert part.shape[1] % LENGTH == 0
    scale = held["scale"].float()[:, None] * STEP
    return of_bytes(POINTS[bits], held["codes"].contiguous(), tables(bits), scale, part.shape, part.narrow_inputs)


KERNEL = LatticeKernel()
