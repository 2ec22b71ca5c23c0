"""What a layout of the compressed-tensors family must be able to do, and what all of them do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from compress.numerics.quant.grids import GRIDS, Grid, IntGrid
from compress.weights.base import TensorSpec
from compress.weights.codes import CodesPart, CodesScheme
from compress.weights.layer import LayerScheme


def codes_of(scheme: LayerScheme) -> CodesScheme:
    """The codes of a layer that a layout suits."""
    assert scheme.codes is not None, "suits was not asked"
    return scheme.codes


class Layout(ABC):
    """How the tensors of a layer of codes are named and shaped.

    name: its own in the config. grid: of the weights; None: integers of any width.
    """

    name: ClassVar[str]
    grid: ClassVar[Grid | None] = None

    def suits(self, scheme: LayerScheme) -> bool:
        """Whether the layout is meant for layers of this scheme; the first that is, is taken."""
        codes = scheme.codes
        return codes is not None and (isinstance(codes.grid, IntGrid) if self.grid is None else codes.grid is self.grid)

    @abstractmethod
    def refuses(self, scheme: LayerScheme) -> str | None:
        """As Format.refuses, for schemes that it suits."""

    def adapt(self, codes: CodesScheme, width: int) -> CodesScheme:
        """The scheme of the same codes as the layout can hold them."""
        return codes

    def adapt_part(self, part: CodesPart) -> CodesPart:
        """The same codes as the layout can hold them."""
        return part

    @abstractmethod
    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        """The tensors of the weight by name."""

    @abstractmethod
    def encode(self, part: CodesPart) -> dict[str, Tensor]:
        """The tensors of the weight."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], scheme: LayerScheme) -> CodesPart:
        """The inverse of encode; `tensors` have the shapes and dtypes of the method of that name."""

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
        """The grid that the `weights` part of a config group speaks of."""
        return GRIDS[f"int{weights['num_bits']}"] if self.grid is None else self.grid
