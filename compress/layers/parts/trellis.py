"""Tiles of weights as tail-biting paths through a bitshift trellis (`numerics.quant.trellis`), with a scale per row.

codes    uint8 [out / tile_rows, in / tile_columns * bytes]   the circular bit string of each tile, in row-major order
scale    float [out]                                          a factor per row
table    float [512, 2]                                       only with code hyb: the values that states look up
signs    int8 [out]                                           only with rotated rows (`scaled_rows`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.layers.base import TensorSpec
from compress.layers.parts.scaled_rows import ScaledRowsPart, ScaledRowsScheme
from compress.numerics.quant.gaussian_codes import TABLE_BITS, Code, length_of, values_of
from compress.numerics.quant.trellis import Trellis, count_bytes, decode

BITS = (1, 1.5, 2, 2.5, 3, 3.5, 4)
"""Bits per weight; halves for codes of pairs."""

WIDEST = 16  # bits of a state
LISTED = 64  # largest tile side that an error message proposes


@dataclass(frozen=True)
class TrellisScheme(ScaledRowsScheme):
    """Trellis paths of `bits` bits per weight.

    Attributes:
        bits: bits per weight.
        states: bits of a state; the trellis has 2^states states.
        code: code of the values of the states (`gaussian_codes`).
        tile_rows: rows of a tile.
        tile_columns: columns of a tile.
        rotated: order of the Hadamard matrix that rotates the rows; None for rows that are not rotated.
    """

    kind: ClassVar[str] = "trellis"

    bits: float
    states: int
    code: Code
    tile_rows: int = 16
    tile_columns: int = 16
    rotated: int | None = None

    @property
    def trellis(self) -> Trellis:
        """The trellis of every tile."""
        return Trellis(self.states, self.bits, length_of(self.code))

    @property
    def tile_bytes(self) -> int:
        """Size of a tile in bytes."""
        return count_bytes(self.tile_rows * self.tile_columns, self.bits)

    @property
    def text(self) -> str:
        tiles = f"tiles of {self.tile_rows} x {self.tile_columns}"
        rotated = "" if self.rotated is None else ", rows rotated"
        return f"trellis of 2^{self.states} states ({self.code}), {self.bits} bits, {tiles}{rotated}"

    def check(self) -> None:
        super().check()
        if self.bits not in BITS:
            raise ValueError(f"bits of {self.kind} is {self.bits}, but it must be one of {list(BITS)}")
        reason = refused_states(self.states, self.bits, self.code)
        if reason := reason or refused_tile(self.tile_rows, self.tile_columns, self.bits):
            raise ValueError(f"{self.kind}: {reason}")

    def refuses(self, shape: tuple[int, int]) -> str | None:
        sides = (("tile_rows", self.tile_columns, "outputs"), ("tile_columns", self.tile_rows, "inputs"))
        for (option, other_size, side), size in zip(sides, shape, strict=True):
            tile_size = getattr(self, option)
            if size % tile_size:
                fitting_sizes = [
                    n for n in range(1, LISTED + 1) if size % n == 0 and not refused_tile(n, other_size, self.bits)
                ]
                instead = (
                    f"use {option}: {', '.join(map(str, fitting_sizes))}, or ignore it"
                    if fitting_sizes
                    else "ignore it"
                )
                return f"{option} {tile_size} does not divide its {size} {side}; {instead}"
        return self.refuses_rotation(shape[0])

    def tensors(self, shape: tuple[int, int], lattice: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        rows, width = shape
        size = rows // self.tile_rows, width // self.tile_columns * self.tile_bytes
        table = {"table": TensorSpec((1 << TABLE_BITS, 2))} if self.code == "hyb" else {}
        return {"codes": TensorSpec(size, torch.uint8), **self.tensors_of_rows(rows), **table}


class TrellisPart(ScaledRowsPart[TrellisScheme]):
    """Packed trellis paths."""

    kind: ClassVar[str] = "trellis"
    names: ClassVar[Mapping[str, str]] = {"codes": "codes", "scale": "scale", "table": "table", "signs": "signs"}

    codes: Int[Tensor, "tiles bytes"]
    table: Float[Tensor, "entries 2"] | None

    def decoded(self, ids: Int[Tensor, " n"] | None = None) -> Float[Tensor, "rows in"]:
        if ids is None:
            return self._tiles(self.codes).flatten(0, 1)
        return self._tiles(self.codes[ids // self.scheme.tile_rows])[
            torch.arange(len(ids), device=ids.device), ids % self.scheme.tile_rows
        ]

    def _tiles(self, codes: Int[Tensor, "n bytes"]) -> Float[Tensor, "n tile_rows in"]:
        """Decode the weights of some rows of tiles."""
        scheme = self.scheme
        values = values_of(scheme.code, scheme.states, self.table, codes.device)
        weights = decode(codes.reshape(-1, scheme.tile_bytes), values, scheme.trellis)
        tiles = weights.view(len(codes), -1, scheme.tile_rows, scheme.tile_columns)
        return tiles.transpose(1, 2).reshape(len(codes), scheme.tile_rows, self.shape[1])

    def in_storage(self, dtype: torch.dtype) -> TrellisPart:
        table = {} if self.table is None else {"table": self.table.to(dtype)}
        return self._with(scale=self.scale.to(dtype), **table)


def refused_states(states: int, bits: float, code: Code) -> str | None:
    """Return why a trellis cannot have states of this many bits; None if it can."""
    if bits * length_of(code) % 1:
        return f"bits {bits} does not suit code: {code}, which has one weight a state; use code: hyb, or whole bits"
    least = int(bits * length_of(code))
    if not least <= states <= WIDEST:
        return f"states {states} does not suit {bits} bits with code: {code}; use {least} to {WIDEST}"
    return None


def refused_tile(rows: int, columns: int, bits: float) -> str | None:
    """Return why a tile cannot have this size; None if it can."""
    unit = 16 if bits % 1 else 8
    if rows * columns % unit:
        return f"a tile of {rows} x {columns} weights does not fill whole bytes; use a multiple of {unit} weights"
    return None
