"""Runs of eight weights as lattice points, with a scale per row; rows may be rotated (`scaled_rows`).

codes    uint8 [out, in / 8 * bytes]   the bytes of each run (`numerics.quant.lattice`)
scale    float [out]                   a factor per row of the points
signs    int8 [out]                    only with rotated rows: signs of the outputs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Self

from compress.layers.base import TensorSpec
from compress.layers.parts.scaled_rows import ScaledRowsPart, ScaledRowsScheme
from compress.numerics.hadamard import signs_of
from compress.numerics.quant.lattice import LENGTH, STAGES, count_bytes, decode


@dataclass(frozen=True)
class LatticeScheme(ScaledRowsScheme):
    """Lattice points of `bits` bits per weight.

    Attributes:
        bits: bits per weight.
        rotated: order of the Hadamard matrix that rotates the rows; None for rows that are not rotated.
    """

    kind: ClassVar[str] = "lattice"

    bits: int
    rotated: int | None = None

    @property
    def text(self) -> str:
        return f"lattice points, {self.bits} bits" + ("" if self.rotated is None else ", rows rotated")

    def check(self) -> None:
        super().check()
        if self.bits not in STAGES:
            raise ValueError(f"bits of {self.kind} is {self.bits}, but it must be one of {sorted(STAGES)}")

    def refuses(self, shape: tuple[int, int]) -> str | None:
        rows, width = shape
        if width % LENGTH:
            return f"runs of {LENGTH} weights do not divide its {width} inputs; leave the layer out (ignore)"
        return self.refuses_rotation(rows)

    def tensors(self, shape: tuple[int, int], lattice: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        rows, width = shape
        codes = TensorSpec((rows, width // LENGTH * count_bytes(self.bits)), torch.uint8)
        return {"codes": codes, **self.tensors_of_rows(rows)}


class LatticePart(ScaledRowsPart[LatticeScheme]):
    """Codes of lattice points."""

    kind: ClassVar[str] = "lattice"
    names: ClassVar[Mapping[str, str]] = {"codes": "codes", "scale": "scale", "signs": "signs"}

    codes: Int[Tensor, "out bytes"]

    @classmethod
    def of(
        cls,
        codes: Int[Tensor, "out runs bytes"],
        scale: Float[Tensor, " out"],
        bits: int,
        rotated: int | None = None,
        seed: int = 0,
    ) -> Self:
        """Create the part from codes.

        Args:
            codes: bytes of each run.
            scale: factor of each row.
            bits: bits per weight.
            rotated: order of the Hadamard matrix that rotates the rows, or None.
            seed: seed of the signs of rotated rows.
        """
        rows, runs, _ = codes.shape
        signs = None if rotated is None else signs_of(rows, seed).to(codes.device)
        tensors = {"codes": codes.flatten(1), "scale": scale, "signs": signs}
        return cls(LatticeScheme(bits, rotated), (rows, runs * LENGTH), tensors)

    def decoded(self, ids: Int[Tensor, " n"] | None = None) -> Float[Tensor, "rows in"]:
        codes = self.codes if ids is None else self.codes[ids]
        values = decode(codes.reshape(-1, count_bytes(self.scheme.bits)), self.scheme.bits)
        return values.view(len(codes), self.shape[1])
