"""What a disk format must be able to do."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from compress.numerics.quant.codes import GroupSize
from compress.numerics.quant.grids import GRIDS, Grid
from compress.numerics.quant.packed import PackedCodes
from compress.numerics.sparse.positions import SparseWeight, Sparsity

UNUSUAL = (
    "activation_scale",
    "outlier_threshold",
    "outlier_columns",
    "input_scaled",
    "input_permuted",
    "float_zeros",
)
"""Fields of a scheme that its JSON leaves out where they have their defaults, as it does `sparsity`."""


@dataclass(frozen=True)
class Scheme:
    """How one layer is stored: all that is needed beside its tensors to read it.

    indexed: columns have a group index. activations: the grid of the inputs, with one scale per token found when the
    layer runs, or one 'static' scale found before. width: the layer's inputs. outlier_threshold, outlier_columns: see
    `numerics.inputs`. input_scaled: inputs are divided by a scale per channel. input_permuted: they are put in another
    order first. sparsity: kept weights alone are stored, and where they stand; grid: None where they are floats.
    float_zeros: zero points need not be whole numbers.
    """

    grid: Grid | None
    group_size: GroupSize
    symmetric: bool
    indexed: bool = False
    activations: Grid | None = None
    width: int | None = None
    activation_scale: Literal["token", "static"] = "token"
    outlier_threshold: float | None = None
    outlier_columns: bool = False
    input_scaled: bool = False
    input_permuted: bool = False
    sparsity: Sparsity | None = None
    float_zeros: bool = False

    @classmethod
    def of(cls, weight: PackedCodes | SparseWeight, activations: Grid | None) -> Scheme:
        """The scheme of a packed or sparse layer."""
        sparsity = None if weight.kept is None else weight.kept.sparsity
        facts = {"activations": activations, "width": weight.shape[1], "sparsity": sparsity}
        if isinstance(weight, SparseWeight):
            return cls(None, "channel", True, **facts)
        facts["float_zeros"] = weight.float_zeros
        return cls(weight.grid, weight.group_size, weight.zero is None, weight.group_index is not None, **facts)

    @property
    def input_tensors(self) -> dict[str, tuple[int, torch.dtype | None]]:
        """The tensors beside the weight's, by the layer's names: (length, dtype or None for that of the scales)."""
        width = self.width or 0
        there = {
            "input_permutation": (self.input_permuted, (width, torch.int32)),
            "input_scale": (self.input_scaled, (width, torch.float32)),
            "activation_scale": (self.activation_scale == "static", (1, None)),
            "outliers": (self.outlier_columns, (width, torch.bool)),
        }
        return {name: kind for name, (present, kind) in there.items() if present}

    @property
    def coded(self) -> Grid:
        """The grid, of a layer that has one."""
        assert self.grid is not None, "the layer is stored in floats"
        return self.grid

    @property
    def text(self) -> str:
        """'int4, group 64, 2:4'."""
        codes = [] if self.grid is None else [self.grid.name, f"group {self.group_size}"]
        return ", ".join(codes + ([] if self.sparsity is None else [self.sparsity.text]))

    def to_json(self) -> dict[str, Any]:
        """Plain values, grids by name; what is said of inputs and of kept weights only where it is not the usual."""
        usual = {f.name: f.default for f in dataclasses.fields(self) if f.name in UNUSUAL}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values = {name: value for name, value in values.items() if name not in usual or value != usual[name]}
        sparsity = values.pop("sparsity")
        if sparsity is not None:
            values["sparse"] = {"pattern": sparsity.text, "kept": sparsity.kept}
        return values | {name: _name(values[name]) for name in ("grid", "activations")}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Scheme:
        """The inverse of to_json."""
        grids = {name: None if values[name] is None else GRIDS[values[name]] for name in ("grid", "activations")}
        sparse = values.get("sparse")
        sparsity = None if sparse is None else Sparsity.named(sparse["pattern"], sparse["kept"])
        given = {name: value for name, value in values.items() if name != "sparse"}
        return cls(**{**given, **grids, "sparsity": sparsity})


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


def refuses_inputs(scheme: Scheme, here: str) -> str | None:
    """Why a format that knows of no outliers, scaled or permuted inputs cannot hold a layer; None if it can."""
    if scheme.outlier_threshold is not None or scheme.outlier_columns:
        return f"{here} cannot say that outlier columns are computed in floats (LLM.int8); use format: native"
    if scheme.input_permuted:
        return (
            f"its inputs are put in another order, which nothing before it could take up and {here} cannot say; "
            "use format: native, or unlinked: skip for the permutation"
        )
    if scheme.input_scaled:
        return (
            f"its inputs are divided by a scale that nothing before it could take up, which {here} cannot say; "
            "use format: native"
        )
    return None


class Format(ABC):
    """A way to store compressed layers. name: its key in a recipe. sparse: whether it can store kept weights alone."""

    name: str
    sparse: bool = False
    input_names: Mapping[str, str] = {}
    """Where the tensors of `Scheme.input_tensors` are stored: name in the layer -> name in the file."""

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
        """The inverse of `encode`, exact.

        Raises KeyError for a tensor that is missing, ValueError for one that cannot be right, named as in the module.
        """

    def encode_floats(self, weight: SparseWeight) -> dict[str, Tensor]:
        """As `encode`, of a pruned layer in floats; only where `sparse`."""
        raise AssertionError("this format stores pruned layers with their zeros")

    def decode_floats(self, tensors: Mapping[str, Tensor], scheme: Scheme) -> SparseWeight:
        """The inverse of `encode_floats`, exact; raises as `decode` does."""
        raise AssertionError("this format stores pruned layers with their zeros")

    def states(self, scheme: CacheScheme, model: PretrainedConfig) -> bool:
        """Whether `config` can say of a model that all of its keys and values are rounded so, and readers bear it."""
        return False

    @abstractmethod
    def config(
        self, schemes: Mapping[str, Scheme], ignore: list[str], version: str, cached: CacheScheme | None = None
    ) -> dict[str, Any] | None:
        """The `quantization_config` for layers by full name; ignore: the linears that stay dense.

        cached: how all keys and values of the model are rounded, where it is a scheme that this format states.
        """

    def cached(self, config: Mapping[str, Any]) -> CacheScheme | None:
        """How a `quantization_config` says that all keys and values are rounded. Raises ValueError."""
        return None

    @abstractmethod
    def schemes(self, config: Mapping[str, Any], names: list[str]) -> dict[str, Scheme]:
        """The inverse of `config` for the linears `names` of the model: which are compressed, and how."""
