"""Products of packed codes on a GPU, and their torch operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.kernels.contract import PartLike, RoundingLike
from compress.kernels.triton.launch import InputQuantizer, TritonWeight, multiply
from compress.native.compiling import constant_result
from compress.native.gpus import capability, installed
from compress.numerics.quant.grids import GRIDS, Float4Grid, Float8Grid, Grid
from compress.numerics.quant.scales import E8M0, Float8Scale

TYPES = (torch.float16, torch.bfloat16, torch.float32)
OLDEST, OLDEST_FLOAT8 = (8, 0), (8, 9)  # compute capabilities of Triton's products of bfloat16 and of 8-bit floats
LARGEST_SUM = 131072  # columns whose products of int8 fit into int32: 128 * 128 * 131072 = 2^31
FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class TritonKernel:
    """Codes of up to 8 bits times floats, or times activations quantized to 8 bits.

    Attributes:
        device: device type of the calls that the kernel supports. Tests set "cpu" to run it in Triton's interpreter.
    """

    device = "cuda"

    def supports(self, part: PartLike, x: Tensor, rounding: RoundingLike | None) -> bool:
        if x.device.type != self.device or x.dtype not in TYPES or (x.requires_grad and torch.is_grad_enabled()):
            return False
        if not available(x.device) or not _reads(part) or not x.shape[-1]:
            return False
        return rounding is None or _rounds(part, rounding, x.device)

    def prepare(self, part: PartLike) -> TritonWeight:
        return wrapped(part)

    def product(
        self, x: Tensor, part: PartLike, prepared: TritonWeight, rounding: RoundingLike | None, bias: Tensor | None
    ) -> Tensor:
        quantizer: Any = rounding
        if quantizer is None:
            return linear(x, prepared, bias)
        return linear(x, prepared, bias, quantizer.grid.name, quantizer.scale)


@constant_result
def available(device: torch.device) -> bool:
    """Whether triton is installed, kernels are not disabled, and it has programs for the device."""
    return installed() and capability(device) >= OLDEST


@constant_result
def multiplies_float8(device: torch.device) -> bool:
    """Whether Triton has products of 8-bit floats for the device."""
    return capability(device) >= OLDEST_FLOAT8


def _reads(part: Any) -> bool:
    """Whether the part has codes of all weights, of up to 8 bits."""
    return part.kind == "codes" and part.lattice == part.shape and part.scheme.grid.bits <= 8


def _rounds(part: Any, rounding: Any, device: torch.device) -> bool:
    """Whether activations are quantized symmetrically to int8 or 8-bit floats, with one scale per row or in total."""
    scheme, grid = rounding.scheme, rounding.scheme.grid
    if scheme.outliers or not scheme.symmetric or scheme.group or scheme.clip != 1 or scheme.groups:
        return False
    if isinstance(grid, Float8Grid):
        return multiplies_float8(device)
    return grid.name == "int8" and part.shape[1] <= LARGEST_SUM


def wrapped(part: Any) -> TritonWeight:
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
    tensors = (
        None if tensor is None else tensor.detach().contiguous() for tensor in (scale, zero, shared, table, index)
    )
    return TritonWeight(words, *tensors, grid.bits, rows, width, group, point, kind, scale_kind, zero_kind)  # type: ignore[arg-type]


def kind_of(grid: Grid) -> str:
    """Return how the programs decode the codes of a grid."""
    if hasattr(grid, "lowest") or grid.offset:
        return "integer"
    if isinstance(grid, Float8Grid):
        return FLOAT8[grid.dtype]
    return "e2m1" if isinstance(grid, Float4Grid) else "table"


def product(
    x: Tensor, weight: TritonWeight, bias: Tensor | None, grid: str = "", scale: Tensor | None = None
) -> Tensor:
    """Compute x W^T + bias.

    Args:
        x: inputs.
        weight: the weight.
        bias: bias, or None.
        grid: name of the grid of the activation quantization, or ''.
        scale: static scale of x, or None.
    """
    rows = x.reshape(-1, weight.width)
    if not rows.numel():
        return x.new_empty(*x.shape[:-1], weight.rows)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
        bias = bias.to(x.dtype).contiguous()
    rounding, native = None, False
    if grid:
        input_grid: Any = GRIDS[grid]
        integer = hasattr(input_grid, "lowest")
        limits = (input_grid.lowest, input_grid.highest) if integer else (-input_grid.span, input_grid.span)
        dtype = torch.int8 if integer else input_grid.dtype
        rounding = InputQuantizer(dtype, input_grid.span, float(limits[0]), float(limits[1]), scale)
        native = weight.one_scale and kind_of(input_grid) == weight.kind and weight.zero_kind != "minimum"
    with torch.cuda.device_of(x):  # where there are several GPUs
        return multiply(rows, weight, bias, rounding, native).view(*x.shape[:-1], weight.rows)


_LIBRARY = torch.library.Library("compress", "FRAGMENT")
_LIBRARY.define(
    "gpu_codes_linear(Tensor x, Tensor? bias, str grid, Tensor? input_scale, Tensor words, Tensor scale, Tensor? zero, "
    "Tensor? shared, Tensor? table, Tensor? index, int bits, int rows, int width, int group, int point, str kind, "
    "str scale_kind, str zero_kind) -> Tensor"
)


def _codes_linear(x: Tensor, bias: Tensor | None, grid: str, input_scale: Tensor | None, *weight: Any) -> Tensor:
    return product(x, TritonWeight(*weight), bias, grid, input_scale)


def _shape_of_codes_linear(x: Tensor, *operands: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], operands[-7])


_LIBRARY.impl("gpu_codes_linear", _codes_linear, "CompositeExplicitAutograd")
torch.library.register_fake("compress::gpu_codes_linear", _shape_of_codes_linear, lib=_LIBRARY)


def linear(x: Tensor, weight: TritonWeight, bias: Tensor | None, grid: str = "", scale: Tensor | None = None) -> Tensor:
    """Compute `product`, as the operator if torch traces."""
    if torch.compiler.is_compiling():
        return torch.ops.compress.gpu_codes_linear(x, bias, grid, scale, *weight.tensors, *weight.values)
    return product(x, weight, bias, grid, scale)
