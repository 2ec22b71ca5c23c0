"""SuperBlock: scales that are small integers times a step for several of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from compress.numerics.division import divided
from compress.numerics.quant.scales import Scaling, positive


@dataclass(frozen=True)
class SuperBlock(Scaling):
    """Integers for `size` consecutive scales of a row, times a float16 step for all of them (k-quants of llama.cpp).

    scale = step * integer. With `minima`, minimum = -low_step * integer, from 0 to `top`, with a separate step. The
    shared
    numbers are the steps of all scales, row by row, then those of all minima; for a part of a matrix (`part`), those of
    one column of scales.

    Attributes:
        size: scales of a super-block.
        top: largest integer.
        bottom: smallest integer; a negative one allows the integers from `bottom` to -1 in addition to 1 to `top`.
        minima: whether each scale has a minimum.
        odd: whether the integers are odd: those of the i-quants are 2 s + 1.
    """

    size: int
    top: int
    bottom: int = 1
    minima: bool = False
    odd: bool = False

    @property
    def stored(self) -> torch.dtype | None:
        return torch.int8 if self.signed else torch.uint8

    @property
    def signed(self) -> bool:
        return self.bottom < 0

    @property
    def super_block(self) -> int:
        return self.size

    @property
    def kinds(self) -> int:
        """The number of steps for each super-block."""
        return 2 if self.minima else 1

    @property
    def from_scales(self) -> bool:
        return True

    def shared_count(self, rows: int, groups: int) -> int:
        return self.kinds * math.ceil(rows * groups / self.size)

    def fit_shared(
        self, extent: Float[Tensor, "out groups"], span: float, shared_absmax: float | None
    ) -> Float[Tensor, " n"] | None:
        return self._step(divided(extent, span)).flatten()

    def shared_of(
        self, scale: Float[Tensor, "out groups"], minimum: Float[Tensor, "out groups"] | None
    ) -> Float[Tensor, " n"]:
        """Compute the steps for scales, and minima at most zero, that were fitted as floats."""
        steps = self._step(scale.abs()).flatten()
        return steps if minimum is None else torch.cat([steps, self._step(-minimum).flatten()])

    def _step(self, values: Float[Tensor, "out groups"]) -> Float[Tensor, "out blocks"]:
        """Return the float16 step with which the largest value of each super-block is its largest integer."""
        values = torch.nn.functional.pad(values.float(), (0, -values.shape[1] % self.size))
        return positive(divided(values.view(len(values), -1, self.size).amax(-1), self.top), torch.float16)

    def part(
        self, shared: Float[Tensor, " n"] | None, rows: int, groups: int, group: int
    ) -> Float[Tensor, " n"] | None:
        assert shared is not None
        return shared.view(self.kinds, rows, -1)[:, :, group // self.size].flatten()

    def _steps(
        self, shared: Tensor | None, like: Float[Tensor, "out groups"], kind: int
    ) -> Float[Tensor, "out groups"]:
        """Return the step of each scale (kind 0), or of each minimum (kind 1)."""
        assert shared is not None
        rows, groups = like.shape
        steps = shared.view(self.kinds, rows, -1)[kind]
        return steps if steps.shape[1] == groups else steps.repeat_interleave(self.size, dim=1)[:, :groups]

    def round(self, extent: Tensor, span: float, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        shared = self.fit_shared(extent, span, None) if shared is None else shared
        steps = self._steps(shared, extent, 0)
        integers = divided(extent, span) / steps
        rounded = torch.round((integers - 1) / 2) * 2 + 1 if self.odd else torch.round(integers)
        return rounded.clamp(1, self.top) * steps

    def encode(self, scale: Float[Tensor, "out groups"], shared: Float[Tensor, " n"] | None) -> Tensor:
        assert self.stored is not None
        return torch.round(scale / self._steps(shared, scale, 0)).to(self.stored)

    def decode(self, stored: Tensor, shared: Float[Tensor, " n"] | None) -> Float[Tensor, "out groups"]:
        return stored.float() * self._steps(shared, stored, 0)

    def round_minimum(self, minimum: Tensor, dtype: torch.dtype, shared: Tensor | None) -> Tensor:
        steps = self._steps(shared, minimum, 1)
        return -torch.round(-minimum / steps).clamp(0, self.top) * steps

    def encode_minimum(self, minimum: Tensor, shared: Tensor | None) -> Tensor:
        return torch.round(-minimum / self._steps(shared, minimum, 1)).to(torch.uint8)

    def decode_minimum(self, stored: Tensor, shared: Tensor | None) -> Tensor:
        return -stored.float() * self._steps(shared, stored, 1)
