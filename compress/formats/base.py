"""What a disk format must be able to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from compress.numerics.quant.grids import GRIDS, Grid
from compress.weights.base import InputTransform, TensorSpec, WeightPart
from compress.weights.layer import LayerScheme


def _name(grid: Grid | None) -> str | None:
    return None if grid is None else grid.name


@dataclass(frozen=True)
class CacheScheme:
    """How an attention's keys and values are rounded as they enter its cache: the grid of each, None: left as it is.

    scale: 'token': one per token and head, found when the model runs; 'static': one of all keys and one of all values,
    found before. symmetric: false adds a zero point to each scale that is found when the model runs.
    """

    keys: Grid | None
    values: Grid | None
    scale: Literal["token", "static"] = "token"
    symmetric: bool = True

    def to_json(self) -> dict[str, Any]:
        """Plain values, grids by name."""
        grids = {"keys": _name(self.keys), "values": _name(self.values)}
        return {**grids, "scale": self.scale, "symmetric": self.symmetric}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CacheScheme:
        """The inverse of to_json. Raises KeyError for a grid that is not known, or a part that is missing."""
        grids = [None if values[name] is None else GRIDS[values[name]] for name in ("keys", "values")]
        return cls(grids[0], grids[1], values["scale"], values["symmetric"])

    @property
    def grids(self) -> tuple[Grid | None, Grid | None]:
        """Of keys, and of values."""
        return self.keys, self.values

    @property
    def static(self) -> tuple[bool, bool]:
        """Whether there is a static scale of keys, and of values."""
        return self.keys is not None and self.scale == "static", self.values is not None and self.scale == "static"

    def token_bytes(self, grid: Grid | None, heads: int, width: int, itemsize: int) -> float:
        """What keys, or values, of a token take on one of `grids`, scales and zero points too; itemsize: of a float."""
        if grid is None:
            return heads * width * itemsize
        beside = itemsize + (0 if self.symmetric else grid.bits / 8) if self.scale == "token" else 0
        return heads * (width * grid.bits / 8 + beside)


def refuses_inputs(scheme: LayerScheme, here: str) -> str | None:
    """Why a format that knows no outliers and no transforms of inputs cannot hold a layer; None if it can."""
    if scheme.rounding is not None and scheme.rounding.outliers:
        return f"{here} cannot say that outlier columns are computed in floats (LLM.int8); use format: native"
    mapped = scheme.maps_inputs
    if mapped is not None:
        return f"{mapped.effect}, and {here} cannot say so; use format: native{mapped.instead}"
    return None


@dataclass(frozen=True)
class StoredLayer:
    """A linear of a checkpoint as a reader finds it. transposed: stored [in, out] when dense. expert: in an expert."""

    scheme: LayerScheme
    transposed: bool
    expert: bool


class Format(ABC):
    """A way to store compressed layers. name: its key in a recipe. sparse: whether it can store kept weights alone."""

    name: str
    sparse: bool = False

    @abstractmethod
    def refuses(self, scheme: LayerScheme) -> str | None:
        """Why a layer of this scheme cannot be stored, with what to do instead; None if it can."""

    def adapt(self, scheme: LayerScheme) -> LayerScheme | None:
        """The scheme of the same layer as it will be stored; None when it will be stored multiplied out."""
        return scheme

    def adapt_part(self, part: WeightPart) -> WeightPart:
        """The same part in the form of `adapt`."""
        return part

    @abstractmethod
    def encode(
        self, scheme: LayerScheme, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]
    ) -> dict[str, Tensor]:
        """The tensors of a layer by their names inside the module."""

    @abstractmethod
    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        """The tensors of a layer that has been adapted, by their names inside the module."""

    def size_bytes(self, scheme: LayerScheme, storage: torch.dtype) -> int:
        """Bytes of all tensors of a layer, its bias not counted; of its dense weight where it is multiplied out."""
        adapted = self.adapt(scheme)
        if adapted is None or adapted.plain:
            return LayerScheme(scheme.shape).size_bytes(storage)
        return sum(spec.size_bytes(storage) for spec in self.tensors(adapted).values())

    @abstractmethod
    def decode(
        self, tensors: Mapping[str, Tensor], scheme: LayerScheme
    ) -> tuple[Sequence[WeightPart], Sequence[InputTransform]]:
        """The inverse of `encode`, exact.

        Raises KeyError for a tensor that is missing, ValueError for one that cannot be right, named as in the module.
        """

    def reads_in(self, scheme: LayerScheme, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which transformers dequantizes a layer of a model that it loads in `dtype`."""
        return dtype

    def unreadable(self, layers: Sequence[StoredLayer], dtype: torch.dtype) -> str | None:
        """Why transformers cannot load a checkpoint with these linears, of which one at least is compressed."""
        return f"format {self.name} is read by compress.load alone"

    def states(self, scheme: CacheScheme, model: PretrainedConfig) -> bool:
        """Whether `config` can say of a model that all of its keys and values are rounded so, and readers bear it."""
        return False

    @abstractmethod
    def config(
        self, schemes: Mapping[str, LayerScheme], ignore: list[str], version: str, cached: CacheScheme | None = None
    ) -> dict[str, Any] | None:
        """The `quantization_config` for layers by full name; ignore: the linears that stay dense.

        cached: how all keys and values of the model are rounded, where it is a scheme that this format states.
        """

    def cached(self, config: Mapping[str, Any]) -> CacheScheme | None:
        """How a `quantization_config` says that all keys and values are rounded. Raises ValueError."""
        return None

    @abstractmethod
    def schemes(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]]) -> dict[str, LayerScheme]:
        """The inverse of `config` for the linears of the model, by name with their shapes (out, in)."""
