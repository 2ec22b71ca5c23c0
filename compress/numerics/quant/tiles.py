"""TileScale: scales and minima that are small integers between two numbers for a tile of several rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compress.numerics.division import divided
from compress.numerics.quant.bits import pack, packed_width, unpack
from compress.numerics.quant.scales import Scaling, positive

KINDS = 4  # float16 numbers of a tile: the lowest scale and the step of scales, then both for minima


@dataclass(frozen=True)
class TileScale(Scaling):
    """Integers of `bits` bits for the scales of `rows` consecutive rows in one group of columns (SpQR, section 4).

    scale = lowest + step * integer and minimum = -(lowest + step * integer), with separate numbers for scales and
    minima.
    Integers are packed along the groups of a row. The shared numbers are the lowest scales [tiles, groups], row by row,
    then the steps, and both for minima; for a part of a matrix (`part`), those of one column of groups.

    Attributes:
        rows: rows of a tile.
        bits: bits of an integer.
    """

    rows: int = 16
    bits: int = 3

    @property
    def stored(self) -> torch.dtype:
        return torch.int32

    @property
    def shared_dtype(self) -> torch.dtype:
        return torch.float16

    @property
    def whole_groups(self) -> bool:
        return True

    @property
    def from_scales(self) -> bool:
        return True

    @property
    def top(self) -> int:
        """The largest integer."""
        return 2**self.bits - 1

    def stored_width(self, groups: int) -> int:
        return packed_width(groups, self.bits)

    def shared_count(self, rows: int, groups: int) -> int:
        return KINDS * self._tiles(rows) * groups

    def _tiles(self, rows: int) -> int:
        return math.ceil(rows / self.rows)

    def fit_shared(
        self, extent: Float[Tensor, "out groups"], span: float, shared_absmax: float | None
    ) -> Float[Tensor, " n"]:
        scale = divided(extent, span)
        return self.shared_of(scale, torch.zeros_like(scale))

    def shared_of(
        self, scale: Float[Tensor, "out groups"], minimum: Float[Tensor, "out groups"] | None
    ) -> Float[Tensor, " n"]:
        numbers: list[Tensor] = []
        for values, is_scale in ((scale, True), (torch.zeros_like(scale) if minimum is None else -minimum, False)):
            lowest, highest = self._ends(values.float())
            lowest = positive(lowest, torch.float16) if is_scale else lowest.half().float()
            numbers += [lowest, positive(divided((highest - lowest).clamp(min=0), self.top), torch.float16)]
        return torch.stack(numbers).flatten()

    def _ends(self, values: Float[Tensor, "out groups"]) -> tuple[Tensor, Tensor]:
        """Return the lowest and the highest value of each tile, [tiles, groups]."""
        missing = -len(values) % self.rows
        tiles = torch.cat([values, values[-1:].expand(missing, -1)]).view(-1, self.rows, values.shape[1])
        return tiles.amin(1), tiles.amax(1)

    def part(
        self, shared: Float[Tensor, " n"] | None, rows: int, groups: int, group: int
    ) -> Float[Tensor, " n"] | None:
        assert shared is not None
        return shared.view(KINDS, -1, groups)[:, :, group].flatten()

    def _numbers(self, shared: Tensor | None, rows: int, kind: int) -> tuple[Tensor, Tensor]:
        """Return (lowest, step) for every row and group; kind 0: of scales, 1: of minima."""
        assert shared is not None
        numbers = shared.float().view(KINDS, self._tiles(rows), -1)[2 * kind : 2 * kind + 2]
        lowest, step = numbers.repeat_interleave(self.rows, dim=1)[:, :rows]
        return lowest, step

    def _integers(self, values: Tensor, shared: Tensor | None, kind: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (integers, lowest, step) of the nearest stored values."""
        lowest, step = self._numbers(shared, len(values), kind)
        return torch.round((values - lowest) / step).clamp(0, self.top), lowest, step

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        shared = self.fit_shared(extent, span, None) if shared is None else shared
        codes, lowest, step = self._integers(divided(extent, span), shared, 0)
        return (lowest + codes * step).to(extent.dtype)

    def encode(
        self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None
    ) -> Int[Tensor, "out words"]:
        return pack(self._integers(scale, shared, 0)[0].to(torch.uint8), self.bits)

    def decode(
        self, stored: Int[Tensor, "out words"], shared: Float[Tensor, " n"] | None
    ) -> Float[Tensor, "out groups"]:
        return self._decoded(stored, shared, 0)

    def _decoded(self, stored: Tensor, shared: Tensor | None, kind: int) -> Tensor:
        lowest, step = self._numbers(shared, len(stored), kind)
        return lowest + unpack(stored, self.bits, lowest.shape[1]).float() * step

    def round_minimum(self, minimum: Tensor, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        shared = self.shared_of(torch.zeros_like(minimum), minimum) if shared is None else shared
        codes, lowest, step = self._integers(-minimum, shared, 1)
        return -(lowest + codes * step).to(minimum.dtype)

    def encode_minimum(self, minimum: Tensor, shared: Tensor | None) -> Tensor:
        return pack(self._integers(-minimum, shared, 1)[0].to(torch.uint8), self.bits)

    def decode_minimum(self, stored: Tensor, shared: Tensor | None) -> Tensor:
        return -self._decoded(stored, shared, 1)
