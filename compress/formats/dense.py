"""Plain weights: every layer multiplied out, in the storage dtype, as any program reads them.

    <m>.weight   [out, in] (or [in, out] where the model's own layer stores it so)

Holds every grid; nothing is smaller than before, which is what this format is for: comparing, and pruned models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from compress.formats.base import CacheScheme, Format, Scheme
from compress.numerics.quant.grids import Grid
from compress.numerics.quant.packed import PackedCodes


class Dense(Format):
    """The `dense` format."""

    name = "dense"

    def refuses(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        if scheme.activations is not None:
            return "format dense cannot say that activations are rounded; use format: compressed-tensors"
        return None

    def adapt(self, packed: PackedCodes) -> PackedCodes | None:
        return None

    def encode(self, packed: PackedCodes, activations: Grid | None) -> dict[str, Tensor]:
        raise AssertionError("layers are multiplied out before they reach this format")

    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
        raise AssertionError("this format holds no codes")

    def config(
        self, schemes: Mapping[str, Scheme], ignore: list[str], version: str, cached: CacheScheme | None = None
    ) -> dict[str, Any] | None:
        return None

    def schemes(self, config: Mapping[str, Any], names: list[str]) -> dict[str, Scheme]:
        return {}
