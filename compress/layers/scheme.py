"""LayerScheme: the description of a layer that passes, plans, formats and loading share."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from compress.layers import parts as part_kinds
from compress.layers import transforms
from compress.layers.base import (
    COMPONENTS,
    InputTransform,
    PartScheme,
    TensorSpec,
    TransformScheme,
    WeightPart,
    read_scheme,
    stored_name,
)
from compress.layers.parts.codes import CodesPart, CodesScheme
from compress.layers.parts.dense import DenseScheme
from compress.layers.parts.sparse import SparseScheme
from compress.layers.transforms.rounding import InputRounding, RoundingScheme
from compress.numerics.quant.grids import Grid
from compress.numerics.sparse.positions import SparseLayout, SparsePolicy, choose

INPUT, WEIGHT = "input", "weight"
"""Prefixes of stored names: of transforms, and of the first part. Further parts have their kind as prefix."""

Role = Literal["linear", "embedding", "tied"]
"""How a layer's weight is used: as a matrix, as a table of rows to look up, or as both (tied embedding and head)."""

ROLES = ("linear", "embedding", "tied")

for _package in (part_kinds, transforms):  # import every kind, so that it is registered
    for _found in pkgutil.iter_modules(_package.__path__):
        if f"{_package.__name__}.{_found.name}" != __name__:
            importlib.import_module(f"{_package.__name__}.{_found.name}")


@dataclass(frozen=True)
class LayerScheme:
    """The description of a layer: shape (out, in), parts of the weight, transforms of the input in order, and role."""

    shape: tuple[int, int]
    parts: tuple[PartScheme, ...] = (DenseScheme(),)
    transforms: tuple[TransformScheme, ...] = ()
    role: Role = "linear"

    @property
    def plain(self) -> bool:
        """Whether it is an ordinary linear layer: one dense weight in the storage dtype, and no transforms."""
        return self.parts == (DenseScheme(),) and not self.transforms

    @property
    def quantized(self) -> bool:
        """Whether any part holds codes."""
        return any(part.quantized for part in self.parts)

    @property
    def free_scales(self) -> bool:
        """Whether any part has scales that training may change."""
        return any(part.free_scales for part in self.parts)

    @property
    def codes(self) -> CodesScheme | None:
        """The codes of a layer whose weight is codes alone, which formats of other programs can hold; else None."""
        only = self.parts[0] if len(self.parts) == 1 else None
        return only if isinstance(only, CodesScheme) else None

    @property
    def all_codes(self) -> tuple[CodesScheme, ...]:
        """All parts that are codes."""
        return tuple(part for part in self.parts if isinstance(part, CodesScheme))

    @property
    def rounding(self) -> RoundingScheme | None:
        """The rounding of inputs, or None."""
        return next((t for t in self.transforms if isinstance(t, RoundingScheme)), None)

    @property
    def maps_inputs(self) -> TransformScheme | None:
        """The first transform other than rounding, or None."""
        return next((t for t in self.transforms if not isinstance(t, RoundingScheme)), None)

    @property
    def mixes(self) -> bool:
        """Whether no column of the weight is for one input channel alone, because a transform mixes them."""
        return any(transform_class(t.kind).mixes for t in self.transforms)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grids of all parts."""
        return tuple(grid for part in self.parts for grid in part.grids)

    @property
    def text(self) -> str:
        """A short text for tables, such as 'int4, group 64, 2:4' or 'dense'."""
        return " + ".join(part.text for part in self.parts)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefix of the stored names of each part."""
        found: list[str] = []
        for i, part in enumerate(self.parts):
            same = sum(other.kind == part.kind for other in self.parts[1:i])
            found.append(WEIGHT if i == 0 else part.kind if same == 0 else f"{part.kind}_{same + 1}")
        return tuple(found)

    def tensors(self) -> dict[str, TensorSpec]:
        """All tensors by their names inside the layer."""
        owners = [*zip(self.prefixes, self.parts, strict=True), *((INPUT, t) for t in self.transforms)]
        return {stored_name(p, name): spec for p, own in owners for name, spec in own.tensors(self.shape).items()}

    def size_bytes(self, storage: torch.dtype) -> int:
        """Bytes of all tensors, without the bias."""
        return sum(spec.size_bytes(storage) for spec in self.tensors().values())

    def with_parts(self, *parts: PartScheme) -> LayerScheme:
        """The layer with other parts."""
        return replace(self, parts=parts)

    def with_transform(self, transform: TransformScheme) -> LayerScheme:
        """The layer with a transform added; it replaces a transform of the same kind."""
        others = [t for t in self.transforms if t.kind != transform.kind]
        return replace(self, transforms=tuple(sorted([*others, transform], key=lambda t: transform_class(t.kind).rank)))

    @property
    def folds(self) -> bool:
        """Whether linear transforms are folded into the weight when the layer is stored: one part without codes."""
        return len(self.parts) == 1 and not self.quantized

    def folded(self, keep_zeros: bool) -> LayerScheme:
        """The layer after `CompressedLinear.absorb_inputs`, if it folds."""
        if not self.folds:
            return self
        linear = [i for i, t in enumerate(self.transforms) if transform_class(t.kind).linear]
        stay = [i for i in linear if not transform_class(self.transforms[i].kind).keeps_zeros] if keep_zeros else []
        gone = [i for i in linear if not stay or i > stay[-1]]
        return replace(self, transforms=tuple(t for i, t in enumerate(self.transforms) if i not in gone))

    def sparse(self, found: Sequence[SparseLayout], storage: torch.dtype, policy: SparsePolicy) -> LayerScheme:
        """The layer with its kept weights stored alone, if the policy says so.

        found: the possible ways to store its mask. A layer with several parts, or whose part cannot store kept weights
        alone, is unchanged.
        """
        sparsity = self.stored_sparsity(found, storage, policy)
        return self if sparsity is None else self.with_parts(SparseScheme(sparsity, self.parts[0]))

    def stored_sparsity(
        self, found: Sequence[SparseLayout], storage: torch.dtype, policy: SparsePolicy
    ) -> SparseLayout | None:
        """How the kept weights are stored alone; None if they are not. Arguments as of `sparse`."""
        value = self.parts[0].value(storage) if len(self.parts) == 1 else None
        return None if value is None or not found or policy == "off" else choose(found, self.shape, value, policy)

    def read(self, tensors: Mapping[str, Tensor]) -> tuple[list[WeightPart], list[InputTransform]]:
        """Rebuild parts and transforms exactly from the tensors of a layer by name.

        Raises KeyError for a missing tensor, ValueError for an invalid one.
        """
        parts: list[Any] = [
            COMPONENTS[part.kind].read(part, self.shape, tensors, prefix)
            for prefix, part in zip(self.prefixes, self.parts, strict=True)
        ]
        mapped: list[Any] = [COMPONENTS[t.kind].read(t, self.shape, tensors, INPUT) for t in self.transforms]
        return parts, mapped

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        transforms = [t.to_json() for t in self.transforms]
        found = {"shape": list(self.shape), "parts": [part.to_json() for part in self.parts]}
        found |= {"transforms": transforms} if transforms else {}
        return found | ({} if self.role == "linear" else {"role": self.role})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of to_json. Raises ValueError for values that do not describe a layer."""
        known = {"shape", "parts", "transforms", "role"}
        if not isinstance(values, Mapping) or not {"shape", "parts"} <= values.keys() <= known:
            raise ValueError(
                f"{str(values)[:100]!r} describes no layer; its fields are shape, parts, transforms and role"
            )
        shape, lists = values["shape"], (values["parts"], values.get("transforms", []))
        if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(n, int) for n in shape):
            raise ValueError(f"shape is {str(shape)[:100]}, but it must be two numbers: outputs and inputs")
        if not all(isinstance(one, list) for one in lists) or not lists[0]:
            raise ValueError("parts must be a list with at least one part, transforms a list")
        parts, mapped = (tuple(read_scheme(one) for one in given) for given in lists)
        found = cls((shape[0], shape[1]), parts, mapped, values.get("role", "linear"))
        found.check()
        return found

    def check(self) -> None:
        """Raise ValueError for a description that no layer can have; for layers that were read from files."""
        if min(self.shape) < 1:
            raise ValueError(f"shape is {list(self.shape)}, but outputs and inputs must be at least 1")
        if self.role not in ROLES:
            raise ValueError(f"role {str(self.role)[:100]!r} is none of {', '.join(ROLES)}")
        kinds = (self.parts, PartScheme), (self.transforms, TransformScheme)
        if wrong := [one.kind for held, kind in kinds for one in held if not isinstance(one, kind)]:
            raise ValueError(f"{wrong[0]} stands among parts, but is a transform, or the other way round")
        for scheme in (*self.parts, *self.transforms):
            scheme.check()


def transform_class(kind: str) -> type[InputTransform]:
    """The component of a kind of transform."""
    component = COMPONENTS[kind]
    assert issubclass(component, InputTransform)
    return component


def layer_tensors(
    parts: Sequence[WeightPart], mapped: Sequence[InputTransform], prefixes: Sequence[str]
) -> dict[str, Tensor]:
    """All tensors of a layer by their names inside it."""
    owners = [*zip(prefixes, parts, strict=True), *((INPUT, t) for t in mapped)]
    return {stored_name(p, name): tensor for p, own in owners for name, tensor in own.tensors().items()}


def codes_alone(parts: Sequence[WeightPart]) -> CodesPart | None:
    """The codes of a weight that has no other part; None for others."""
    only = parts[0] if len(parts) == 1 else None
    return only if isinstance(only, CodesPart) else None


def rounding_among(transforms: Sequence[InputTransform]) -> InputRounding | None:
    """The rounding among the transforms of a layer; None if there is none."""
    return next((t for t in transforms if isinstance(t, InputRounding)), None)
