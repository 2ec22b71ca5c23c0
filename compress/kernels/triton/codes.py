"""Products of packed codes on a GPU, and their torch operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.kernels.contract import Part, RoundingLike
from compress.kernels.triton.launch import PackedCodes, Rounding, multiply
from compress.native.gpus import capability, installed
from compress.numerics.quant.grids import GRIDS, Float4Grid, Float8Grid, Grid
from compress.numerics.quant.scales import E8M0, Float8Scale

TYPES = (torch.float16, torch.bfloat16, torch.float32)
OLDEST, OLDEST_FLOAT8 = (8, 0), (8, 9)  # compute capabilities of Triton's products of bfloat16 and of 8-bit floats
LARGEST_SUM = 131072  # columns whose products of int8 fit into int32: 128 * 128 * 131072 = 2^31
FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class CodesKernel:
    """Codes of up to 8 bits times floats, or times inputs that are rounded to 8 bits.

    device: the type of the devices whose calls it computes. Tests set "cpu" to run it in Triton's interpreter.
    """

    device = "cuda"

    def supports(self, part: Part, x: Tensor, rounding: RoundingLike | None) -> bool:
        if x.device.type != self.device or x.dtype not in TYPES or (x.requires_grad and torch.is_grad_enabled()):
            return False
        if not available(x.device) or not _reads(part) or not x.shape[-1]:
            return False
        return rounding is None or _rounds(part, rounding, x.device)

    def prepare(self, part: Part) -> PackedCodes:
        return wrapped(part)

    def product(
        self, x: Tensor, part: Part, prepared: PackedCodes, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        known: Any = rounding
        if known is None:
            return linear(x, prepared, bias)
        return linear(x, prepared, bias, known.grid.name, known.scale)


@torch.compiler.assume_constant_result
def available(device: torch.device) -> bool:
    """Whether triton is installed, kernels are not switched off, and it has programs for the device."""
    return installed() and capability(device) >= OLDEST


@torch.compiler.assume_constant_result
def multiplies_float8(device: torch.device) -> bool:
    """Whether Triton has products of 8-bit floats for the device."""
    return capability(device) >= OLDEST_FLOAT8


def _reads(part: Any) -> bool:
    """Whether the part holds codes of all weights, of up to 8 bits."""
    return part.kind == "codes" and part.lattice == part.shape and part.scheme.grid.bits <= 8


def _rounds(part: Any, rounding: Any, device: torch.device) -> bool:
    """Whether inputs are rounded to int8 or to 8-bit floats around zero, with one scale per row or for all rows."""
    scheme, grid = rounding.scheme, rounding.scheme.grid
    if scheme.outliers or not scheme.symmetric or scheme.scale == "group" or scheme.clip != 1 or scheme.groups:
        return False
    if isinstance(grid, Float8Grid):
        return multiplies_float8(device)
    return grid.name == "int8" and part.shape[1] <= LARGEST_SUM


def wrapped(part: Any) -> PackedCodes:
    """Describe the tensors of a part to the programs. Scales of a grid that no program decodes are decoded once."""
    grid, size, index = part.grid, part.group_size, part.group_index
    scale, shared, scale_kind = part.scale, None, "float"
    if isinstance(grid.scaling, E8M0):
        scale_kind = "e8m0"
    elif isinstance(grid.scaling, Float8Scale):
        scale_kind, shared = "e4m3", part.shared
    elif grid.scaling.stored is not None:
        scale = part.scales()
    zero = part.zero
    if grid.offset:
        zero = part.zeros()
    zero_kind = "none" if zero is None else "minimum" if grid.offset else "point"
    table = None
    if (kind := kind_of(grid)) == "table":
        levels = grid.levels + grid.levels[-1:] * (2**grid.bits - len(grid.levels))  # all codes are in the table
        table = torch.tensor(levels, device=part.words.device)
    rows, width = part.shape
    group = size if isinstance(size, int) and scale.shape[1] > 1 else 0
    point = -getattr(grid, "lowest", 0)
    words = part.words.detach().contiguous()
    words = words.view(torch.uint8) if grid.bits == 8 else words
    others = (
        None if tensor is None else tensor.detach().contiguous() for tensor in (scale, zero, shared, table, index)
    )
    return PackedCodes(words, *others, grid.bits, rows, width, group, point, kind, scale_kind, zero_kind)  # type: ignore[arg-type]


def kind_of(grid: Grid) -> str:
    """How the programs decode the codes of a grid."""
    if hasattr(grid, "lowest") or grid.offset:
        return "integer"
    if isinstance(grid, Float8Grid):
        return FLOAT8[grid.dtype]
    return "e2m1" if isinstance(grid, Float4Grid) else "table"


def product(x: Tensor, weight: PackedCodes, bias: Tensor | None, grid: str = "", scale: Tensor | None = None) -> Tensor:
    """x W^T + bias. grid: the grid to which x is rounded first, or ''. scale: static scale of x, or None."""
    rows = x.reshape(-1, weight.width)
    if not rows.numel():
        return x.new_empty(*x.shape[:-1], weight.rows)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
        bias = bias.to(x.dtype).contiguous()
    rounding, native = None, False
    if grid:
        known: Any = GRIDS[grid]
        integer = hasattr(known, "lowest")
        limits = (known.lowest, known.highest) if integer else (-known.span, known.span)
        dtype = torch.int8 if integer else known.dtype
        rounding = Rounding(dtype, known.span, float(limits[0]), float(limits[1]), scale)
        native = weight.one_scale and kind_of(known) == weight.kind and weight.zero_kind != "minimum"
    with torch.cuda.device_of(x):  # where there are several GPUs
        return multiply(rows, weight, bias, rounding, native).view(*x.shape[:-1], weight.rows)


_LIBRARY = torch.library.Library("compress", "FRAGMENT")
_LIBRARY.define(
    "gpu_codes_linear(Tensor x, Tensor? bias, str grid, Tensor? input_scale, Tensor words, Tensor scale, Tensor? zero, "
    "Tensor? shared, Tensor? table, Tensor? index, int bits, int rows, int width, int group, int point, str kind, "
    "str scale_kind, str zero_kind) -> Tensor"
)


def _codes_linear(x: Tensor, bias: Tensor | None, grid: str, input_scale: Tensor | None, *weight: Any) -> Tensor:
    return product(x, PackedCodes(*weight), bias, grid, input_scale)


def _shape_of_codes_linear(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], rest[-7])


_LIBRARY.impl("gpu_codes_linear", _codes_linear, "CompositeExplicitAutograd")
torch.library.register_fake("compress::gpu_codes_linear", _shape_of_codes_linear, lib=_LIBRARY)


def linear(x: Tensor, weight: PackedCodes, bias: Tensor | None, grid: str = "", scale: Tensor | None = None) -> Tensor:
    """`product`, as the operator where torch traces."""
    if torch.compiler.is_compiling():
        return torch.ops.compress.gpu_codes_linear(x, bias, grid, scale, *weight.tensors, *weight.values)
    return product(x, weight, bias, grid, scale)
