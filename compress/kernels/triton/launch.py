"""Tiles, splits and calls of the Triton programs."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.kernels.triton.counters import counters

PROGRAMS = "compress.kernels.triton.programs"
VECTORS = 2  # rows of inputs up to which each is multiplied without tensor cores
FEW = 16  # rows of inputs up to which these are not copied
MOST = 64  # rows of inputs for which weights are decoded in the product; for more, separate decoding is faster
MAX_PLANS = 64  # cached plans of a weight
AT_ONCE = 1024  # elements of a block of `round_rows`
VECTOR_ROWS = 2, 4  # rows of weights of a program for one row of inputs
VECTOR_WAVES = 6  # programs per multiprocessor, if there are so many
VECTOR_WORDS = 32, 256  # least and most words of a row that a step of it reads
MAGIC = {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}  # 1024 and 128, whose last digit is 1, in both halves


@dataclass(frozen=True, eq=False)
class TritonWeight:
    """The weights of a part as the programs read them; most tensors are those of the part.

    Attributes:
        words: int32 [out, words], as in `layers.parts.codes`; uint8 for codes of 8 bits.
        scale: [out or 1, groups].
        zero: zero points or minima, or None.
        shared: float32 [1], divides scales that are stored as 8-bit floats.
        table: float32 [2^bits], or None.
        index: int32 [in], the group of each column, or None.
        bits: bits of a code.
        rows: number of rows.
        width: number of columns.
        group: columns per scale; 0: all.
        point: zero point of all codes.
        kind: kind of codes of `decoding`.
        scale_kind: kind of scales of `decoding`.
        zero_kind: kind of zero points of `decoding`.
        plans: cached plans of products, by what they depend on.
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
    plans: dict[tuple[int, int, torch.dtype, bool], ProductPlan] = field(default_factory=dict, repr=False)

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
        """Number of codes in the shortest run that fills whole words."""
        return 1 if self.words.dtype is torch.uint8 else math.lcm(self.bits, 32) // self.bits

    @property
    def units(self) -> int:
        """Number of units of a row."""
        return math.ceil(self.width / self.per_unit)

    def pairs(self, dtype: torch.dtype) -> bool:
        """Whether the programs decode codes in pairs for operands of this dtype."""
        integers = self.kind == "integer" and self.bits in (2, 4)
        return dtype in MAGIC and (integers or self.kind == "e2m1") and self.uniform

    def at_once(self, dtype: torch.dtype) -> bool:
        """Whether all codes of a unit are decoded together for operands of this dtype."""
        return self.per_unit == 1 or self.pairs(dtype)

    @property
    def by_words(self) -> bool:
        """Whether words contain whole codes, and the columns of a word have one scale."""
        return self.bits in (2, 4, 8) and (self.one_scale or (self.index is None and self.group % self.per_word == 0))

    @property
    def per_word(self) -> int:
        """Number of codes in a word of 32 bits, of codes of 2, 4 or 8 bits."""
        return 32 // self.bits

    @property
    def one_scale(self) -> bool:
        """Whether a row has one scale."""
        return self.group == 0 and self.index is None

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        """The tensors for a program; `words` replaces those that it does not read."""
        return tuple(self.words if tensor is None else tensor for tensor in self.tensors)

    @property
    def uniform(self) -> bool:
        """Whether the columns of a unit have one scale."""
        return self.one_scale or (self.index is None and self.group % self.per_unit == 0)

    def scaled(self, columns: int) -> str:
        """Return where scales are multiplied: per "tile", per "step" of `columns` columns, or per "weight"."""
        if self.zero_kind == "minimum" or self.index is not None:
            return "weight"
        if self.one_scale:
            return "tile"
        return "step" if self.group % columns == 0 else "weight"

    @property
    def options(self) -> dict[str, Any]:
        """Constants that all programs are compiled for."""
        return {
            "bits": self.bits,
            "per_unit": self.per_unit,
            "point": self.point,
            "kind": self.kind,
            "scale_kind": self.scale_kind,
            "zero_kind": self.zero_kind,
            "group_kind": "one" if self.one_scale else "run" if self.index is None else "index",
        }

    @property
    def scale_stride(self) -> int:
        """Number of scales between those of consecutive rows."""
        return 0 if self.scale.shape[0] == 1 else self.scale.shape[1]


@dataclass(frozen=True)
class ProductTile:
    """Sizes of one step of a program, and its resources.

    Attributes:
        m: rows of inputs.
        n: rows of weights.
        units: units of a row of weights.
        warps: warps of a program.
        stages: stages of the software pipeline.
        waves: programs per multiprocessor that `split` aims at, so that their memory reads overlap.
    """

    m: int
    n: int
    units: int
    warps: int
    stages: int
    waves: int

    @classmethod
    def of(cls, batch: int, weight: TritonWeight, dtype: torch.dtype, device: torch.device) -> ProductTile:
        """Choose a tile for `batch` rows of inputs.

        ptxas spills hardly a register of these (`tests/kernels/compile_programs.py`).

        Args:
            batch: rows of inputs.
            weight: the weight.
            dtype: dtype of the operands.
            device: the GPU.
        """
        per_unit, size = weight.per_unit, dtype.itemsize
        wide, at_once = size == 4, weight.at_once(dtype)  # float32 is multiplied without tensor cores
        m = rows_of_tile(batch, dtype)
        n, waves = (64, 2) if per_unit == 1 and size == 2 else (128, 4 if m <= FEW else 2)  # measured on an H200
        n = 32 if wide else n
        units = 32 if size == 1 else 16  # columns of the smallest product
        if at_once:
            units = 128 // max(per_unit, size if wide else 1)
        scales = 4 * n * units if weight.scaled(units * per_unit) == "weight" else 0
        read = units * (m * per_unit * size + n * weight.bits * per_unit // 8) + scales  # bytes of a step
        turned = (m + n) * units * per_unit * size if at_once and per_unit > 1 else 0  # on their way to tensor cores
        stages = max(1, min(4 if m <= 32 else 3, (shared_memory(device) - turned) // read))
        if not at_once or weight.kind == "table":
            stages = 1  # a step loads more than `read` counts: of every place, or from the table
        return cls(m, n, units, 8 if m > 32 else 4, stages, waves)

    def tiles(self, batch: int, rows: int) -> int:
        """Return the number of tiles of the output."""
        return math.ceil(batch / self.m) * math.ceil(rows / self.n)

    def split(self, batch: int, rows: int, units: int, device: torch.device) -> int:
        """Return the units per program, so that a product of few tiles also uses the whole device."""
        steps, tiles = math.ceil(units / self.units), self.tiles(batch, rows)
        parts = max(1, min(steps, self.waves * multiprocessors(device) // tiles))
        return math.ceil(steps / parts) * self.units


@dataclass(frozen=True)
class InputQuantizer:
    """Activation quantization of a product.

    Attributes:
        dtype: dtype of the codes.
        span: `Grid.span`.
        lowest: lowest code.
        highest: highest code.
        static: static scale [1], or None.
    """

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
        """The smallest normal number and the epsilon of 8-bit floats."""
        return (1.0, 1.0) if self.integer else (torch.finfo(self.dtype).tiny, torch.finfo(self.dtype).eps)


@dataclass(frozen=True)
class ProductInputs:
    """Inputs of `product`.

    Attributes:
        x: [batch, width], or, if `laid`, [batch, places, units] or columns in the order of `turned`.
        row: elements between rows.
        place: elements between places.
        laid: whether columns are reordered.
        scale: scale of each row, for codes.
    """

    x: Tensor
    row: int
    place: int
    laid: bool
    scale: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, per_unit: int, places: int) -> ProductInputs:
        """Wrap floats [batch, width]. Many rows are first copied in the order in which the program reads columns."""
        if x.shape[0] <= FEW or per_unit == 1:
            return cls(x, x.stride(0), 0, False)
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % per_unit))
        shape = (len(x), -1, 2, per_unit // 2) if places == 1 else (len(x), 1, -1, per_unit)
        ordered = padded.view(shape).transpose(2, 3).contiguous()
        return cls(ordered, ordered.stride(0), ordered.stride(2), True)

    @classmethod
    def rounded(cls, x: Tensor, rounding: InputQuantizer, places: int) -> ProductInputs:
        """Quantize floats [batch, width], as `numerics.quant.inputs.round_inputs` does."""
        batch, width = x.shape
        units = math.ceil(width / places)
        codes = torch.empty(batch, units * places, dtype=rounding.dtype, device=x.device)
        scale = torch.empty(batch, dtype=torch.float32, device=x.device)
        like = torch.float32 if rounding.integer else x.dtype
        facts, static = torch.finfo(like), rounding.static
        limits = rounding.span, rounding.lowest, rounding.highest, *rounding.digits, facts.eps, facts.max
        programs().round_rows[(batch,)](
            x,
            x if static is None else static,
            codes,
            scale,
            width,
            units,
            x.stride(0),
            places,
            *limits,
            has_static_scale=static is not None,
            like=language(like),
            integer=rounding.integer,
            block=AT_ONCE,
        )
        return cls(codes, units * places, units, places > 1, scale)


def rows_of_tile(batch: int, dtype: torch.dtype) -> int:
    """Return the rows of inputs of a tile, a power of two, for operands of this dtype."""
    return min(max(1 << (batch - 1).bit_length(), FEW), 32 if dtype.itemsize == 4 else 128)


@cache
def programs() -> Any:
    """Return the module of the programs; triton is imported when the first of them is called."""
    return importlib.import_module(PROGRAMS)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 2 on a CPU, where Triton's interpreter runs the programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use."""
    least = 99 << 10  # of compute capability 8.9
    if device.type != "cuda":
        return least
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", least)


def language(dtype: torch.dtype) -> Any:
    """Return a float dtype in Triton."""
    return getattr(programs().tl, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class ProductPlan:
    """How the products of a weight with a number of input rows are computed.

    Attributes:
        places: places of a unit, if the codes of each place are decoded separately; otherwise 1.
        grid: programs [tiles, parts].
        length: units of a part.
        options: constants of the programs.
    """

    places: int
    grid: tuple[int, int]
    length: int
    options: dict[str, Any]

    @classmethod
    def of(
        cls, weight: TritonWeight, batch: int, dtype: torch.dtype, native: bool, device: torch.device
    ) -> ProductPlan:
        """Plan a product.

        Args:
            weight: the weight.
            batch: rows of inputs.
            dtype: dtype of the inputs.
            native: whether codes of inputs and weights are multiplied.
            device: the GPU.
        """
        operand = torch.int8 if native else dtype
        tile = ProductTile.of(batch, weight, operand, device)
        length, at_once = tile.split(batch, weight.rows, weight.units, device), weight.at_once(operand)
        columns = tile.units * weight.per_unit
        interpreted = device.type == "cpu"  # Triton's interpreter cannot multiply bfloat16
        # weights are rounded once, by the product of a number and a scale that the dtype holds
        exact = weight.scale.dtype == dtype or (weight.scale_kind == "e8m0" and dtype == torch.bfloat16)
        options = weight.options | {
            "uniform": weight.uniform,
            "scaled": weight.scaled(columns),
            "at_once": at_once,
            "is_complete": weight.width % columns == 0,
            "direct": not interpreted,
            "native": native,
            "single": exact and weight.uniform and weight.zero_kind == "none" and weight.kind != "table",
            "like": language(dtype),
            "operand": language(torch.float32 if interpreted else dtype),
            "block_m": tile.m,
            "block_n": tile.n,
            "block_u": tile.units,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        grid = tile.tiles(batch, weight.rows), math.ceil(weight.units / length)
        return cls(1 if at_once else weight.per_unit, grid, length, options)


def plan_of(weight: TritonWeight, batch: int, dtype: torch.dtype, native: bool, device: torch.device) -> ProductPlan:
    """Return `ProductPlan.of`, cached for the next call."""
    m = rows_of_tile(batch, torch.int8 if native else dtype)
    key = m, math.ceil(batch / m), dtype, native
    if (plan := weight.plans.get(key)) is None:
        if len(weight.plans) >= MAX_PLANS:
            weight.plans.clear()
        plan = weight.plans[key] = ProductPlan.of(weight, batch, dtype, native, device)
    return plan


def multiply(
    x: Tensor, weight: TritonWeight, bias: Tensor | None, rounding: InputQuantizer | None, native: bool
) -> Tensor:
    """Compute x [batch, width] times a weight, plus bias.

    Args:
        x: inputs.
        weight: the weight.
        bias: bias, or None.
        rounding: activation quantization, or None.
        native: whether codes of inputs and weights are multiplied.
    """
    batch, device = x.shape[0], x.device
    if batch <= VECTORS and rounding is None and weight.by_words:
        return multiply_vectors(x, weight, bias)
    if batch > MOST and rounding is None and weight.at_once(x.dtype) and x.dtype in MAGIC:
        return torch.nn.functional.linear(x, dequantized(weight, x.dtype), bias)
    plan = plan_of(weight, batch, x.dtype, native, device)
    count = plan.grid[1]
    y = torch.empty(batch, weight.rows, dtype=x.dtype, device=device)
    parts, arrived = y, weight.words
    if count > 1:
        parts = torch.empty(count, *y.shape, dtype=torch.float32, device=device)
        arrived = counters(device, plan.grid[0])
    if rounding is None:
        inputs = ProductInputs.of(x, weight.per_unit, plan.places)
    else:
        inputs = ProductInputs.rounded(x, rounding, plan.places)
    programs().product[plan.grid](
        inputs.x,
        y if inputs.scale is None else inputs.scale,
        *weight.pointers,
        y if bias is None else bias,
        y,
        parts,
        arrived,
        batch,
        weight.rows,
        weight.width,
        weight.units,
        plan.length,
        weight.words.shape[1],
        weight.group,
        weight.scale_stride,
        inputs.row,
        inputs.place,
        MAGIC.get(x.dtype, 0),
        **plan.options,
        biased=bias is not None,
        rounded=inputs.scale is not None,
        laid=inputs.laid,
        split=count > 1,
        precision="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
    )
    return y


def multiply_vectors(x: Tensor, weight: TritonWeight, bias: Tensor | None) -> Tensor:
    """Compute `multiply` for few rows of x.

    A program multiplies one of them; that of the next row finds the words in the cache.
    """
    words = weight.words.view(torch.int32)
    stride = words.shape[1]
    block, n = vector_block(stride), vector_rows(weight.rows, x.device)
    y = torch.empty(x.shape[0], weight.rows, dtype=x.dtype, device=x.device)
    options = {name: value for name, value in weight.options.items() if name != "per_unit"}
    low_one, high_one = (one_at(23 - count * weight.bits) for count in (2, 1))
    programs().vector[(x.shape[0] * math.ceil(weight.rows / n),)](
        x,
        words,
        *weight.pointers[1:],
        y if bias is None else bias,
        y,
        x.shape[0],
        weight.rows,
        weight.width,
        stride,
        weight.scale_stride,
        x.stride(0),
        low_one,
        high_one,
        **options,
        group=weight.group,
        biased=bias is not None,
        direct=x.device.type != "cpu",
        is_complete=stride * weight.per_word == weight.width and stride % block == 0,
        block_n=n,
        block_u=block,
        num_warps=1,
        num_stages=1,
    )
    return y


def vector_block(stride: int) -> int:
    """Return the words of a row that `vector` reads in a step: a power of two, if possible a divisor of the row."""
    least, most = VECTOR_WORDS
    divisor = stride & -stride
    return min(most, divisor if divisor >= 4 * least else max(least, 1 << (stride - 1).bit_length()))


def vector_rows(rows: int, device: torch.device) -> int:
    """Return the rows of weights per program of `vector`: the most that leave every multiprocessor several programs."""
    min_programs = VECTOR_WAVES * multiprocessors(device)
    return max((n for n in VECTOR_ROWS if rows >= n * min_programs), default=VECTOR_ROWS[0])


def one_at(bit: int) -> int:
    """Return the bits of the float32 in which this bit of the mantissa is worth 1."""
    return (127 + 23 - bit) << 23


def dequantized(weight: TritonWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight [rows, width] in float16 or bfloat16, for codes that are decoded at once."""
    out = torch.empty(weight.rows, weight.width, dtype=dtype, device=weight.words.device)
    rows, units, interpreted = 32, 128 // weight.per_unit, out.device.type == "cpu"
    programs().weights[(math.ceil(weight.rows / rows), math.ceil(weight.units / units))](
        *weight.pointers,
        out,
        weight.rows,
        weight.width,
        weight.units,
        weight.words.shape[1],
        weight.group,
        weight.scale_stride,
        MAGIC[dtype],
        **weight.options,
        direct=not interpreted,
        like=language(dtype),
        operand=language(torch.float32 if interpreted else dtype),
        block_n=rows,
        block_u=units,
        num_warps=4,
    )
    return out
