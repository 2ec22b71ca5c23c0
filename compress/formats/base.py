"""What a disk format must be able to do."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compress.numerics.codes import GroupSize
from compress.numerics.grids import GRIDS, Grid
from compress.numerics.packed import PackedCodes


@dataclass(frozen=True)
class Scheme:
    """How one layer is stored: all that is needed beside its tensors to read it.

    indexed: columns have a group index. activations: the grid of the inputs. width: the layer's inputs.
    """

    grid: Grid
    group_size: GroupSize
    symmetric: bool
    indexed: bool = False
    activations: Grid | None = None
    width: int | None = None

    @classmethod
    def of(cls, packed: PackedCodes, activations: Grid | None) -> Scheme:
        """The scheme of a packed layer."""
        indexed = packed.group_index is not None
        return cls(packed.grid, packed.group_size, packed.zero is None, indexed, activations, packed.shape[1])

    def to_json(self) -> dict[str, Any]:
        """Plain values, grids by name."""
        values = dataclasses.asdict(self) | {"grid": self.grid.name}
        return values | {"activations": None if self.activations is None else self.activations.name}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Scheme:
        """The inverse of to_json."""
        inputs = values["activations"]
        named = {"grid": GRIDS[values["grid"]], "activations": None if inputs is None else GRIDS[inputs]}
        return cls(**{**values, **named})


class Format(ABC):
    """A way to store compressed layers. name: its key in a recipe."""

    name: str

    @abstractmethod
    def refuses(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        """Why a layer of this scheme and shape (out, in) cannot be stored, with what to do instead; None if it can."""

    def adapt(self, packed: PackedCodes) -> PackedCodes | None:
        """The same weight in a form that can be stored; None when it will be stored multiplied out."""
        return packed

    @abstractmethod
    def encode(self, packed: PackedCodes, activations: Grid | None) -> dict[str, Tensor]:
        """The tensors of a layer by their names inside the module."""

    @abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> PackedCodes:
        """The inverse of `encode`, exact."""

    @abstractmethod
    def config(self, schemes: Mapping[str, Scheme], ignore: list[str], version: str) -> dict[str, Any] | None:
        """The `quantization_config` for layers by full name; ignore: the linears that stay dense."""

    @abstractmethod
    def schemes(self, config: Mapping[str, Any], names: list[str]) -> dict[str, Scheme]:
        """The inverse of `config` for the linears `names` of the model: which are compressed, and how."""
