"""What a layout of the compressed-tensors family must be able to do, and what all of them do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from compress.formats.base import Scheme
from compress.numerics.quant.grids import GRIDS, Grid, IntGrid
from compress.numerics.quant.packed import PackedCodes


class Layout(ABC):
    """How the tensors of a layer are named and shaped.

    name: its own in the config. grid: of the weights; None: integers of any width.
    """

    name: ClassVar[str]
    grid: ClassVar[Grid | None] = None

    def suits(self, scheme: Scheme) -> bool:
        """Whether the layout is meant for layers of this scheme; the first that is, is taken."""
        return isinstance(scheme.grid, IntGrid) if self.grid is None else scheme.grid is self.grid

    @abstractmethod
    def refuses(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        """As Format.refuses, for schemes that it suits."""

    def adapt(self, packed: PackedCodes) -> PackedCodes:
        """The same weight as the layout can hold it."""
        return packed

    @abstractmethod
    def encode(self, packed: PackedCodes) -> dict[str, Tensor]:
        """The layer's tensors."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
        """The inverse of encode."""

    def weight_arguments(self, scheme: Scheme) -> dict[str, Any]:
        """The `weights` part of a config group (QuantizationArgs)."""
        size = scheme.group_size
        return {
            "num_bits": scheme.coded.bits,
            "type": "int" if isinstance(scheme.grid, IntGrid) else "float",
            "symmetric": scheme.symmetric,
            "group_size": size if isinstance(size, int) else None,
            "strategy": "group" if isinstance(size, int) else size,
            "dynamic": False,
        }

    def grid_of(self, weights: Mapping[str, Any]) -> Grid:
        """The grid that the `weights` part of a config group speaks of."""
        return GRIDS[f"int{weights['num_bits']}"] if self.grid is None else self.grid
