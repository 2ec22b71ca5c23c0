"""Layout: the contract of the layouts of compressed-tensors, and their common code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from compress.checkpoint.formats.accepted import UNUSED, Accepted, only
from compress.layers.base import TensorSpec
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.grids import GRIDS, Grid, IntGrid

FLOATS = {"type": only("float"), "symmetric": only(True), "actorder": UNUSED}
"""What the `weights` part of a config group says of floats."""


def codes_of(scheme: LayerScheme) -> CodesScheme:
    """The codes of a layer that a layout suits."""
    assert scheme.codes is not None, "suits was not asked"
    return scheme.codes


def columns_of_group(codes: CodesScheme) -> int:
    """The columns that share a scale and cannot be split; 1 if a whole row shares one, because each part repeats it."""
    return codes.group_size if isinstance(codes.group_size, int) else 1


class Layout(ABC):
    """The names and shapes of the tensors of a layer of codes.

    name: as in the config. grid: of the weights; None: integers of any width. strategies: what may share a scale.
    states: the other values of the `weights` part of a config group that the layout can have.
    """

    name: ClassVar[str]
    grid: ClassVar[Grid | None] = None
    strategies: ClassVar[tuple[str, ...]] = ("group", "channel", "tensor")
    states: ClassVar[Mapping[str, Accepted]] = {"type": only("int"), "num_bits": only(2, 3, 4, 5, 6, 7, 8)}

    def suits(self, scheme: LayerScheme) -> bool:
        """Whether layers of this scheme belong in the layout; the first layout that suits is used."""
        codes = scheme.codes
        if codes is None or self.grid is not None:
            return codes is not None and codes.grid is self.grid
        return isinstance(codes.grid, IntGrid) and codes.grid.plain

    @abstractmethod
    def refuses(self, scheme: LayerScheme) -> str | None:
        """As Format.refuses, for schemes that suit the layout."""

    def adapt(self, codes: CodesScheme, width: int) -> CodesScheme:
        """The scheme of the same codes in the stored form of the layout."""
        return codes

    def adapt_part(self, part: CodesPart) -> CodesPart:
        """The same codes in the stored form of the layout."""
        return part

    @abstractmethod
    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        """The tensors of the weight by name."""

    def units(self, codes: CodesScheme) -> tuple[int, int]:
        """As Format.units."""
        return codes.rows, columns_of_group(codes)

    @abstractmethod
    def encode(self, part: CodesPart) -> dict[str, Tensor]:
        """The tensors of the weight."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], scheme: LayerScheme) -> CodesPart:
        """The inverse of encode. tensors: their shapes and dtypes are those of the method `tensors`."""

    def weight_arguments(self, scheme: LayerScheme) -> dict[str, Any]:
        """The `weights` part of a config group (QuantizationArgs)."""
        codes = codes_of(scheme)
        size = codes.group_size
        return {
            "num_bits": codes.grid.bits,
            "type": "int" if isinstance(codes.grid, IntGrid) else "float",
            "symmetric": codes.symmetric,
            "group_size": size if isinstance(size, int) else None,
            "strategy": "group" if isinstance(size, int) else size,
            "dynamic": False,
        }

    def grid_of(self, weights: Mapping[str, Any]) -> Grid:
        """The grid that the `weights` part of a config group states."""
        return GRIDS[f"int{weights['num_bits']}"] if self.grid is None else self.grid
