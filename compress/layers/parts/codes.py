"""Codes of a grid, packed as a dense bit stream, with their scales and zero points.

    packed        int32 [O, ceil(I*b/32)]   unsigned codes along the input axis (`numerics.quant.bits`), counted from 0
    scale         float [O, G]              [1, 1] per tensor; uint8 where the grid stores scales in a byte; packed
                                            integers int32 [O, ceil(G*s/32)] where it stores them in s bits
    scale_shared  float32 or float16 [n]    parameters shared by all scales, only for grids that have them
    zero_point    int8 [O, G]               only with zero points; floats with float_zeros
    g_idx         int32 [I]                 the group of each column, only where groups are not contiguous

W = (code - zero) * scale for integer grids; W = value(code) * scale for other grids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from typing_extensions import Self

from compress.layers.base import PartScheme, TensorSpec, WeightPart, stored_name
from compress.layers.fields import read_grid
from compress.numerics.dtypes import is_finite
from compress.numerics.quant.bits import pack, packed_width, unpack
from compress.numerics.quant.codes import Codes, GroupSize, grouped, groups_in, spread, store, vanished
from compress.numerics.quant.grids import Grid, IntGrid
from compress.numerics.sparse.positions import PART, KeptRows, PackedMask, Value


@dataclass(frozen=True)
class CodesScheme(PartScheme):
    """Codes of a grid with a scale per group of columns.

    Attributes:
        grid: number grid of the codes.
        group_size: columns that share a scale, 'channel' (a whole row) or 'tensor' (the whole matrix).
        symmetric: whether there are no zero points.
        indexed: whether groups are not contiguous; a group index per column is stored.
        float_zeros: whether zero points are floats.
        rows: consecutive rows with equal scales (blocks of rows x group_size weights, or whole rows).
    """

    kind: ClassVar[str] = "codes"
    readers: ClassVar[Mapping[str, Any]] = {"grid": read_grid}

    grid: Grid
    group_size: GroupSize
    symmetric: bool = True
    indexed: bool = False
    float_zeros: bool = False
    rows: int = 1

    @classmethod
    def of(cls, codes: Codes) -> Self:
        """Return the scheme of codes."""
        return cls(
            codes.grid,
            codes.group_size,
            codes.zero is None,
            codes.group_index is not None,
            codes.float_zeros,
            codes.rows,
        )

    @property
    def quantized(self) -> bool:
        return True

    @property
    def grids(self) -> tuple[Grid, ...]:
        return (self.grid,)

    @property
    def text(self) -> str:
        if self.rows > 1:
            return f"{self.grid.name}, blocks {self.rows} x {self.group_size}"
        return f"{self.grid.name}, group {self.group_size}"

    def tensors(self, shape: tuple[int, int], lattice: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        rows, width = shape
        *leading, count = lattice or shape
        scaling, scale_rows = self.grid.scaling, 1 if self.group_size == "tensor" else rows
        groups = groups_in(width, self.group_size)
        scales = scale_rows, scaling.stored_width(groups)
        shared = scaling.shared_count(scale_rows, groups)
        specs = {
            "packed": TensorSpec((*leading, packed_width(count, self.grid.bits)), torch.int32),
            "scale": TensorSpec(scales, scaling.stored),
            "zero_point": None if self.symmetric else TensorSpec(scales, self._zero_dtype),
            "g_idx": TensorSpec((width,), torch.int32) if self.indexed else None,
            "scale_shared": TensorSpec((shared,), scaling.shared_dtype) if shared else None,
        }
        return {name: spec for name, spec in specs.items() if spec is not None}

    @property
    def _zero_dtype(self) -> torch.dtype | None:
        return None if self.float_zeros else self.grid.zero_dtype

    @property
    def free_scales(self) -> bool:
        return self.grid.free_scales and self.rows == 1

    @property
    def scale_groups(self) -> GroupSize:
        return self.group_size

    def check(self) -> None:
        super().check()
        if self.grid.symmetric_only and not self.symmetric:
            raise ValueError(f"{self.grid.name} has no zero points, but symmetric is false")
        if self.float_zeros and (self.symmetric or not isinstance(self.grid, IntGrid)):
            raise ValueError(f"float_zeros are zero points of integers, but this is {self.grid.name}")
        if self.grid.group_size not in (None, self.group_size):
            raise ValueError(f"groups of {self.grid.name} have {self.grid.group_size} columns, not {self.group_size}")
        if self.indexed and not isinstance(self.group_size, int):
            raise ValueError(f"indexed groups have a size, but group_size is {self.group_size}")

    def refuses(self, shape: tuple[int, int]) -> str | None:
        width = shape[1]
        if isinstance(self.group_size, int) and self.group_size > max(width, self.grid.group_size or 0):
            larger = f"group_size {self.group_size} is larger than its {width} inputs"
            return f"{larger}; use group_size: channel, or a smaller one"
        if width % self.grid.block:
            return (
                f"its {width} inputs are not a multiple of {self.grid.block}, the super-blocks of weights "
                f"{self.grid.name}; set fallback: int5, or use a grid without super-blocks for it"
            )
        if self.rows > 1 and isinstance(self.group_size, int) and width % self.group_size:
            return (
                f"blocks of {self.group_size} columns do not divide its {width} inputs; use a group_size that divides "
                "them, or block_rows: 1"
            )
        return None

    def value(self, storage: torch.dtype) -> Value:
        return self.grid.bits


class CodesPart(WeightPart[CodesScheme]):
    """Packed codes with their scales.

    Attributes:
        words: packed codes.
        scale: scales as stored: floats, or integers for grids that pack their scales.
        zero: zero points as stored, or None.
        group_index: group of each column, or None for contiguous groups.
        shared: parameters shared by all scales, or None.
        lattice: shape of the unpacked codes: (out, in), or `SparseLayout.values` of packed sparse weights.
    """

    kind: ClassVar[str] = "codes"
    names: ClassVar[Mapping[str, str]] = {
        "words": "packed",
        "scale": "scale",
        "zero": "zero_point",
        "group_index": "g_idx",
        "shared": "scale_shared",
    }

    words: Int[Tensor, "*lines words"]
    scale: Shaped[Tensor, "out groups"]
    zero: Shaped[Tensor, "out groups"] | None
    group_index: Int[Tensor, " in"] | None
    shared: Float[Tensor, " n"] | None

    def __init__(
        self,
        scheme: CodesScheme,
        shape: tuple[int, int],
        tensors: Mapping[str, Tensor | None],
        lattice: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(scheme, shape, tensors)
        self.lattice = lattice or shape

    @classmethod
    def of(cls, codes: Codes) -> Self:
        """Pack codes without loss."""
        grid = codes.grid
        words = pack(codes.codes.to(torch.int16) - grid.lowest_stored, grid.bits)
        zero = codes.zero
        if zero is not None and not codes.float_zeros:
            zero = grid.encode_zero(zero, codes.shared)
        scale = grid.scaling.encode(codes.scale, codes.shared)
        shared = None if codes.shared is None else codes.shared.to(grid.scaling.shared_dtype)
        tensors = {"words": words, "scale": scale, "zero": zero, "shared": shared}
        return cls(CodesScheme.of(codes), codes.shape, {**tensors, "group_index": codes.group_index})

    def validate(self, prefix: str) -> None:
        super().validate(prefix)
        index, size, scales = self.group_index, self.scheme.group_size, self.scales()
        if not is_finite(scales):
            raise ValueError(f"{stored_name(prefix, 'scale')} holds a number that is not finite")
        if index is not None and isinstance(size, int):
            check_index(stored_name(prefix, "g_idx"), index, scales.shape[1], size)
        bounds = None if self.scheme.float_zeros else self.grid.integers
        if self.zero is not None and bounds is not None:
            low, high = int(self.zero.min()), int(self.zero.max())
            if low < bounds[0] or high > bounds[1]:
                name = stored_name(prefix, "zero_point")
                raise ValueError(f"{name} holds {low} to {high}, but {self.grid.name} has {bounds[0]} to {bounds[1]}")
        zeros = self.zeros()
        if zeros is not None and not is_finite(zeros):
            raise ValueError(f"{stored_name(prefix, 'zero_point')} holds a number that is not finite")
        if not self.grid.complete and not all(map(self.grid.has_values, self._unpacked_in_steps())):
            raise ValueError(f"{stored_name(prefix, 'packed')} holds codes that {self.grid.name} does not have")

    def _unpacked_in_steps(self) -> Iterator[Int[Tensor, "*lines codes"]]:
        """Unpack the stored codes, some of them at a time to limit memory."""
        bits, count = self.grid.bits, self.lattice[-1]
        if self.words.ndim == 2:
            for rows in self.words.split(max(1, PART // count)):
                yield unpack(rows, bits, count)
        else:
            for start in range(0, count, PART):  # 32 codes fill whole words
                words = self.words[start // 32 * bits :][: PART // 32 * bits]
                yield unpack(words, bits, min(PART, count - start))

    def changed(self, scheme: CodesScheme | None = None, **tensors: Any) -> CodesPart:
        """Return the part with some tensors replaced."""
        buffers = {name: getattr(self, name) for name in self.names}
        return CodesPart(scheme or self.scheme, self.shape, {**buffers, **tensors}, self.lattice)

    @property
    def grid(self) -> Grid:
        """The grid of the codes."""
        return self.scheme.grid

    @property
    def group_size(self) -> GroupSize:
        """Number of columns that share a scale, 'channel' or 'tensor'."""
        return self.scheme.group_size

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype if self.grid.scaling.stored is None else torch.float32

    def scales(self) -> Float[Tensor, "out groups"]:
        """Decode the scales."""
        return self.grid.scaling.decode(self.scale, self.shared)

    def zeros(self) -> Tensor | None:
        """Decode the zero points or minima."""
        if self.zero is None or self.scheme.float_zeros:
            return self.zero
        return self.grid.decode_zero(self.zero, self.shared)

    def codes(self) -> Codes:
        """Unpack the codes, with scales and zero points."""
        scale = self.scales()
        zero = self.zeros()
        zero = None if zero is None else zero.to(scale.dtype)
        unsigned = unpack(self.words, self.grid.bits, self.shape[1])
        signed = store(unsigned.to(torch.int16) + self.grid.lowest_stored, self.grid)
        return Codes(
            signed,
            scale,
            zero,
            self.grid,
            self.group_size,
            self.group_index,
            self.shared,
            self.scheme.float_zeros,
            self.scheme.rows,
        )

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        all_rows = slice(None)
        return self.dequantized(unpack(self.words, self.grid.bits, self.shape[1]), all_rows, dtype)

    def rows_at(self, ids: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "n in"]:
        return self.dequantized(unpack(self.words[ids], self.grid.bits, self.shape[1]), ids, dtype)

    def dequantized(
        self, codes: Int[Tensor, "rows in"], rows: slice | Tensor, dtype: torch.dtype
    ) -> Float[Tensor, "rows in"]:
        """Dequantize unsigned codes of some rows: (code - zero) * scale.

        Args:
            codes: unsigned codes of these rows.
            rows: range or indices of the rows.
            dtype: dtype of the result.
        """
        scale = self.scales().to(self.grid.computes_in(dtype))
        scale_rows = slice(None) if scale.shape[0] == 1 else rows
        zero = self.zeros()
        scale, zero = scale[scale_rows], None if zero is None else zero[scale_rows]
        height, width = codes.shape
        if not isinstance(self.grid, IntGrid):
            scale = spread(scale, width, self.group_size, self.group_index)
            low = None if zero is None else spread(zero.to(scale.dtype), width, self.group_size, self.group_index)
            return self.grid.decode(codes, scale, low).to(dtype)
        # Stored codes are unsigned; integers below 256 are exact in every float dtype.
        values = codes.to(dtype).add_(self.grid.lowest)
        groups = scale.shape[1]
        if self.group_index is None and groups > 1 and width % groups == 0 and self.group_size == width // groups:
            parts = values.view(height, groups, width // groups)
            if zero is not None:
                parts.sub_(zero.to(dtype)[..., None])
            parts.mul_(scale[..., None])
            return values
        if zero is not None:
            values.sub_(spread(zero.to(dtype), width, self.group_size, self.group_index))
        return values.mul_(spread(scale, width, self.group_size, self.group_index))

    def in_storage(self, dtype: torch.dtype) -> CodesPart:
        if self.grid.scaling.stored is not None:
            return self
        zero = self.zero.to(dtype) if self.zero is not None and self.zero.is_floating_point() else self.zero
        scale = self.scale.to(dtype)
        if (self.scale.dtype, dtype) == (torch.float16, torch.bfloat16) and not torch.equal(scale.half(), self.scale):
            scale = self.scale  # read from a format with float16 scales; bfloat16 has fewer digits and no fewer bytes
        return self.changed(scale=scale, zero=zero)

    def vanished(self, weight: Float[Tensor, "out in"]) -> int:
        return vanished(weight, self.codes())

    # Packed sparse weights

    def gathered(self, positions: PackedMask) -> WeightPart:
        codes = positions.gather(unpack(self.words, self.grid.bits, self.shape[1]))
        steps = [pack(part, self.grid.bits) for part in codes.split(PART, dim=-1)]
        buffers = {name: getattr(self, name) for name in self.names} | {"words": torch.cat(steps, dim=-1)}
        return CodesPart(self.scheme, self.shape, buffers, tuple(codes.shape))

    def kept_rows(self, part: KeptRows, dtype: torch.dtype) -> Float[Tensor, "rows in"]:
        height = part.rows.stop - part.rows.start
        codes = torch.zeros(height, self.shape[1], dtype=torch.uint8, device=self.words.device)
        part.write(self.kept_codes(part), codes)
        return self.dequantized(codes, part.rows, dtype).masked_fill_(~part.mask, 0)

    def kept_codes(self, part: KeptRows) -> Int[Tensor, " kept"]:
        """Unpack the unsigned codes of some rows of packed sparse weights."""
        if self.words.ndim == 2:
            return unpack(self.words[part.rows], self.grid.bits, self.lattice[1]).flatten()
        start, stop = part.values.start, part.values.stop
        word_start = start // 32 * 32  # 32 codes fill whole words
        words = self.words[word_start // 32 * self.grid.bits : packed_width(stop, self.grid.bits)]
        return unpack(words, self.grid.bits, stop - word_start)[start - word_start :]

    # Training

    @property
    def free_scale(self) -> Float[Tensor, "out groups"] | None:
        return self.scale if self.scheme.free_scales else None

    def with_scale(self, scale: Float[Tensor, "out groups"]) -> CodesPart:
        return self.changed(scale=scale)

    def spread(self, per_group: Float[Tensor, "out groups"]) -> Float[Tensor, "out in"]:
        return spread(per_group, self.shape[1], self.group_size, self.group_index)

    def sum_groups(self, values: Float[Tensor, "out in"]) -> Float[Tensor, "out groups"]:
        if self.group_index is not None:
            zeros = values.new_zeros(values.shape[0], self.scale.shape[1])
            return zeros.index_add_(1, self.group_index.long(), values)
        return grouped(values, self.group_size).sum(-1)


MOST_PADDING = 16
"""The most columns of an indexed group, relative to the group size."""


def check_index(name: str, index: Int[Tensor, " in"], groups: int, size: int | None = None) -> None:
    """Check the group of every column.

    Args:
        name: name of the tensor, for errors.
        index: group of every column.
        groups: number of groups.
        size: columns of a group; None: any number. Some groups may have more, but not so many that a layout that gives
            all groups the same number takes far more memory than the codes.

    Raises:
        ValueError: for a group that does not exist, or one with too many columns.
    """
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= groups:
        raise ValueError(f"{name} holds groups from {low} to {high}, but the layer has {groups} groups")
    if size is not None and (largest := int(index.long().bincount().max())) > MOST_PADDING * size:
        raise ValueError(f"{name} holds a group of {largest} columns, but group_size is {size}")
