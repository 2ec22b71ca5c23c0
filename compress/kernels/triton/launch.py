"""Tiles, splits and calls of the Triton programs."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

PROGRAMS = "compress.kernels.triton.programs"
FEW = 16  # rows of inputs up to which a tile of `matrix` holds all
WAVES = 4  # programs per multiprocessor that `Tile.split` aims at, so that their reads of memory overlap
AT_ONCE = 1024  # elements that `round_rows` and `combine` hold


@dataclass(frozen=True, eq=False)
class PackedCodes:
    """The weights of a part as the programs read them; the words, and mostly all tensors, are those of the part.

    words: int32 [out, words], as in `weights.codes`. scale: [out or 1, groups]; zero: zero points or minima, or None.
    shared: float32 [1], divides scales that are stored as 8-bit floats. table: float32 [2^bits], or None. index: int32
    [in], the group of each column, or None. The kinds are those of `programs`. group: columns per scale; 0: all.
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    shared: Tensor | None
    table: Tensor | None
    index: Tensor | None
    bits: int
    rows: int
    width: int
    group: int
    point: int
    kind: str
    scale_kind: str
    zero_kind: str

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, in the order of the operator's arguments."""
        return self.words, self.scale, self.zero, self.shared, self.table, self.index

    @property
    def values(self) -> tuple[int, int, int, int, int, str, str, str]:
        """The other fields, in the order of the operator's arguments."""
        sizes = self.bits, self.rows, self.width, self.group, self.point
        return *sizes, self.kind, self.scale_kind, self.zero_kind

    @property
    def per_unit(self) -> int:
        """Codes in the shortest run that fills whole words."""
        return math.lcm(self.bits, 32) // self.bits

    @property
    def units(self) -> int:
        """Units of a row."""
        return math.ceil(self.width / self.per_unit)

    @property
    def one_scale(self) -> bool:
        """Whether a row has one scale."""
        return self.group == 0 and self.index is None

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        """The tensors for a program; words stand for those that it does not read."""
        return tuple(self.words if tensor is None else tensor for tensor in self.tensors)

    @property
    def options(self) -> dict[str, Any]:
        """What a program is compiled for."""
        uniform = self.one_scale or (self.index is None and self.group % self.per_unit == 0)
        group_kind = "one" if self.one_scale else "run" if self.index is None else "index"
        kinds = {
            "kind": self.kind,
            "scale_kind": self.scale_kind,
            "zero_kind": self.zero_kind,
            "group_kind": group_kind,
        }
        return {"bits": self.bits, "per_unit": self.per_unit, "point": self.point, "uniform": uniform, **kinds}

    def sizes(self, length: int) -> tuple[int, ...]:
        """The numbers for a program. length: units per split."""
        strides = self.words.shape[1], self.group, 0 if self.scale.shape[0] == 1 else self.scale.shape[1]
        return self.rows, self.width, self.units, length, *strides


@dataclass(frozen=True)
class Tile:
    """Rows of inputs, rows of weights and units that one step of a program multiplies, and its resources."""

    m: int
    n: int
    units: int
    warps: int
    stages: int

    @classmethod
    def of(cls, batch: int, per_unit: int, size: int) -> Tile:
        """A tile for `batch` rows of inputs. size: bytes of an operand.

        Chosen without a GPU: ptxas spills hardly a register of these (`tests/kernels/compile_programs.py`).
        """
        wide = size == 4  # float32 is multiplied without tensor cores, in registers
        m = min(max(1 << (batch - 1).bit_length(), FEW), 32 if wide else 128)
        units = 32 if (per_unit <= 8 and not wide) or size == 1 else 16
        inputs = m * units * per_unit * size  # bytes of the inputs of a step, which wait in shared memory
        stages = 3 if inputs <= 16384 else 2 if inputs <= 32768 else 1
        return cls(m, 32 if wide else 64, units, 8 if m > 32 else 4, stages)

    @classmethod
    def of_vector(cls, per_unit: int) -> Tile:
        """A tile for one row of inputs."""
        return cls(1, 16, 64 if per_unit <= 16 else 32, 4, 1)

    def tiles(self, batch: int, rows: int) -> int:
        """The number of tiles of the output."""
        return math.ceil(batch / self.m) * math.ceil(rows / self.n)

    def split(self, batch: int, rows: int, units: int, device: torch.device) -> int:
        """Units per program, so that a product of few tiles also uses the whole device."""
        steps = math.ceil(units / self.units)
        splits = max(1, min(steps, WAVES * multiprocessors(device) // self.tiles(batch, rows)))
        return math.ceil(steps / splits) * self.units


@dataclass(frozen=True)
class Rounding:
    """How inputs are rounded: the dtype of the codes, the numbers of the grid, and a static scale [1] or None."""

    dtype: torch.dtype
    span: float
    lowest: float
    highest: float
    static: Tensor | None

    @property
    def integer(self) -> bool:
        """Whether the codes are integers."""
        return self.dtype is torch.int8

    @property
    def digits(self) -> tuple[float, float]:
        """The smallest normal number and the last digit of 1, of 8-bit floats."""
        return (1.0, 1.0) if self.integer else (torch.finfo(self.dtype).tiny, torch.finfo(self.dtype).eps)


@dataclass(frozen=True)
class Inputs:
    """Inputs of `matrix`, [batch, units, places in a unit] with any strides; for codes: scale and sum of each row."""

    x: Tensor
    strides: tuple[int, int, int]
    scale: Tensor | None = None
    sums: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, per_unit: int) -> Inputs:
        """Floats [batch, width]. Many rows are copied first, so that the columns of one place are a run."""
        if x.shape[0] <= FEW:
            return cls(x, (x.stride(0), per_unit, 1))
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % per_unit))
        places = padded.unflatten(1, (-1, per_unit)).transpose(1, 2).contiguous()
        return cls(places, (places.stride(0), 1, places.stride(1)))

    @classmethod
    def rounded(cls, x: Tensor, rounding: Rounding, per_unit: int) -> Inputs:
        """Codes of floats [batch, width], as `numerics.quant.inputs.round_inputs` computes them."""
        batch, width = x.shape
        units = math.ceil(width / per_unit)
        codes = torch.empty(batch, per_unit, units, dtype=rounding.dtype, device=x.device)
        scale = torch.empty(batch, dtype=torch.float32, device=x.device)
        sums = torch.empty(batch, dtype=torch.int32, device=x.device)
        like = torch.float32 if rounding.integer else x.dtype
        facts, static = torch.finfo(like), rounding.static
        limits = rounding.span, rounding.lowest, rounding.highest, *rounding.digits, facts.eps, facts.max
        programs().round_rows[(batch,)](
            x, x if static is None else static, codes, scale, sums, width, units, x.stride(0), per_unit, *limits,
            given=static is not None, like=language(like), integer=rounding.integer, block=AT_ONCE,
        )  # fmt: skip
        return cls(codes, (codes.stride(0), 1, units), scale, sums)


@cache
def programs() -> Any:
    """The module of the programs; triton is imported when the first of them is called."""
    return importlib.import_module(PROGRAMS)


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors; 2 on a CPU, where Triton's interpreter runs the programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def language(dtype: torch.dtype) -> Any:
    """A dtype of floats in Triton."""
    return getattr(programs().tl, str(dtype).removeprefix("torch."))


def multiply(x: Tensor, weight: PackedCodes, bias: Tensor | None, rounding: Rounding | None, native: bool) -> Tensor:
    """x [batch, width] times a weight, plus bias. native: codes of inputs and weights are multiplied."""
    batch = x.shape[0]
    if batch == 1 and rounding is None:
        tile = Tile.of_vector(weight.per_unit)
    else:
        tile = Tile.of(batch, weight.per_unit, 1 if native else x.element_size())
    length = tile.split(batch, weight.rows, weight.units, x.device)
    splits = math.ceil(weight.units / length)
    y = torch.empty(batch, weight.rows, dtype=x.dtype, device=x.device)
    out = y if splits == 1 else torch.empty(splits, *y.shape, dtype=torch.float32, device=x.device)
    added = bias if splits == 1 else None
    if tile.m == 1:
        _vector(x, weight, added, out, tile, length, splits)
    else:
        inputs = Inputs.of(x, weight.per_unit) if rounding is None else Inputs.rounded(x, rounding, weight.per_unit)
        _matrix(inputs, x.dtype, weight, added, out, tile, length, splits, native)
    if splits > 1:
        end, count = y if bias is None else bias, y.numel()
        grid = (math.ceil(count / AT_ONCE),)
        programs().combine[grid](out, end, y, splits, count, weight.rows, biased=bias is not None, block=AT_ONCE)
    return y


def _options(weight: PackedCodes, bias: Tensor | None, tile: Tile) -> dict[str, Any]:
    sizes = {"block_n": tile.n, "block_u": tile.units, "num_warps": tile.warps, "num_stages": tile.stages}
    return {**weight.options, **sizes, "biased": bias is not None}


def _vector(
    x: Tensor, weight: PackedCodes, bias: Tensor | None, y: Tensor, tile: Tile, length: int, splits: int
) -> None:
    grid = tile.tiles(1, weight.rows), splits
    end = y if bias is None else bias
    programs().vector[grid](x, *weight.pointers, end, y, *weight.sizes(length), **_options(weight, bias, tile))


def _matrix(
    inputs: Inputs, dtype: torch.dtype, weight: PackedCodes, bias: Tensor | None, y: Tensor, tile: Tile, length: int,
    splits: int, native: bool,
) -> None:  # fmt: skip
    batch = inputs.x.shape[0]
    grid = tile.tiles(batch, weight.rows), splits
    scale, sums = (y if tensor is None else tensor for tensor in (inputs.scale, inputs.sums))
    interpreted = inputs.x.device.type == "cpu"  # Triton's interpreter cannot multiply bfloat16
    options = _options(weight, bias, tile)
    programs().matrix[grid](
        inputs.x, scale, sums, *weight.pointers, y if bias is None else bias, y, batch, *weight.sizes(length),
        *inputs.strides, **options, rounded=inputs.scale is not None, native=native, like=language(dtype),
        operand=language(torch.float32 if interpreted else dtype), block_m=tile.m,
        precision="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
    )  # fmt: skip
