"""LayerScheme: the description of a layer, used by passes, plans, formats and loading."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
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
"""How the weight of a layer is used: as a matrix, as an embedding table, or as both (tied embedding and LM head)."""

ROLES = ("linear", "embedding", "tied")

LARGEST_SIZE = 2**31 - 1
"""The most outputs or inputs of a layer; kernels count them in 32 bits."""
MOST_PARTS = 64
"""The most parts of a layer; passes make fewer than ten."""

for _package in (part_kinds, transforms):  # import every kind, so that it is registered
    for _module in pkgutil.iter_modules(_package.__path__):
        importlib.import_module(f"{_package.__name__}.{_module.name}")


@dataclass(frozen=True)
class LayerScheme:
    """The description of a layer.

    Attributes:
        shape: (out, in).
        parts: summands of the weight.
        transforms: transforms of the input, in the order in which they are applied.
        role: how the weight is used.
    """

    shape: tuple[int, int]
    parts: tuple[PartScheme, ...] = (DenseScheme(),)
    transforms: tuple[TransformScheme, ...] = ()
    role: Role = "linear"

    @property
    def plain(self) -> bool:
        """Whether the layer is an ordinary linear layer: one dense weight in the storage dtype, and no transforms."""
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
        """The codes of a layer whose only part is codes, which formats of other programs can store; else None."""
        part = self.parts[0] if len(self.parts) == 1 else None
        return part if isinstance(part, CodesScheme) else None

    @property
    def all_codes(self) -> tuple[CodesScheme, ...]:
        """All parts that are codes."""
        return tuple(part for part in self.parts if isinstance(part, CodesScheme))

    @property
    def rounding(self) -> RoundingScheme | None:
        """The activation quantizer, or None."""
        return next((t for t in self.transforms if isinstance(t, RoundingScheme)), None)

    @property
    def maps_inputs(self) -> TransformScheme | None:
        """The first transform other than activation quantization, or None."""
        return next((t for t in self.transforms if not isinstance(t, RoundingScheme)), None)

    @property
    def mixes(self) -> bool:
        """Whether a transform mixes input channels, so that no column of the weight belongs to one channel."""
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
        counts: Counter[str] = Counter()
        prefixes = [WEIGHT]
        for kind in (part.kind for part in self.parts[1:]):
            counts[kind] += 1
            prefixes.append(kind if counts[kind] == 1 else f"{kind}_{counts[kind]}")
        return tuple(prefixes)

    def tensors(self) -> dict[str, TensorSpec]:
        """Return the specifications of all tensors by their names inside the layer."""
        owners = [*zip(self.prefixes, self.parts, strict=True), *((INPUT, t) for t in self.transforms)]
        return {stored_name(p, name): spec for p, scheme in owners for name, spec in scheme.tensors(self.shape).items()}

    def size_bytes(self, storage: torch.dtype) -> int:
        """Return the size of all tensors in bytes, without the bias."""
        return sum(spec.size_bytes(storage) for spec in self.tensors().values())

    def with_parts(self, *parts: PartScheme) -> LayerScheme:
        """Return the layer with other parts."""
        return replace(self, parts=parts)

    def with_transform(self, transform: TransformScheme) -> LayerScheme:
        """Return the layer with a transform added; it replaces a transform of the same kind."""
        other_transforms = [t for t in self.transforms if t.kind != transform.kind]
        return replace(
            self, transforms=tuple(sorted([*other_transforms, transform], key=lambda t: transform_class(t.kind).rank))
        )

    @property
    def folds(self) -> bool:
        """Whether linear transforms are folded into the weight when the layer is stored: one part without codes."""
        return len(self.parts) == 1 and not self.quantized

    def folded(self, keep_zeros: bool) -> LayerScheme:
        """Return the scheme after `CompressedLinear.absorb_inputs`, if the layer folds."""
        if not self.folds:
            return self
        linear = [i for i, t in enumerate(self.transforms) if transform_class(t.kind).linear]
        unfoldable = (
            [i for i in linear if not transform_class(self.transforms[i].kind).keeps_zeros] if keep_zeros else []
        )
        folded = [i for i in linear if not unfoldable or i > unfoldable[-1]]
        return replace(self, transforms=tuple(t for i, t in enumerate(self.transforms) if i not in folded))

    def sparse(self, patterns: Sequence[SparseLayout], storage: torch.dtype, policy: SparsePolicy) -> LayerScheme:
        """Return the layer with packed sparse weights, if the policy says so.

        A layer with several parts, or whose part cannot be packed sparsely, is unchanged.

        Args:
            patterns: sparsity patterns that the mask has.
            storage: storage dtype of the run.
            policy: when to pack sparse weights.
        """
        sparsity = self.stored_sparsity(patterns, storage, policy)
        return self if sparsity is None else self.with_parts(SparseScheme(sparsity, self.parts[0]))

    def stored_sparsity(
        self, patterns: Sequence[SparseLayout], storage: torch.dtype, policy: SparsePolicy
    ) -> SparseLayout | None:
        """Return the pattern of the packed sparse weights; None if the weights are not packed.

        Args:
            patterns: sparsity patterns that the mask has.
            storage: storage dtype of the run.
            policy: when to pack sparse weights.
        """
        value = self.parts[0].value(storage) if len(self.parts) == 1 else None
        return None if value is None or not patterns or policy == "off" else choose(patterns, self.shape, value, policy)

    def read(self, tensors: Mapping[str, Tensor]) -> tuple[list[WeightPart], list[InputTransform]]:
        """Rebuild parts and transforms exactly from the tensors of a layer by name, and `validate` them.

        Raises:
            KeyError: for a missing tensor.
            ValueError: for an invalid tensor.
        """
        parts, transforms = self.components(tensors)
        self.validate(parts, transforms)
        return parts, transforms

    def components(self, tensors: Mapping[str, Tensor]) -> tuple[list[WeightPart], list[InputTransform]]:
        """Rebuild parts and transforms as `read` does; only shapes and dtypes of the tensors are checked."""
        parts: list[Any] = [
            COMPONENTS[part.kind].read(part, self.shape, tensors, prefix)
            for prefix, part in zip(self.prefixes, self.parts, strict=True)
        ]
        transforms: list[Any] = [COMPONENTS[t.kind].read(t, self.shape, tensors, INPUT) for t in self.transforms]
        return parts, transforms

    def validate(self, parts: Sequence[WeightPart], transforms: Sequence[InputTransform]) -> None:
        """Check that a layer whose tensors were read from a file can be computed.

        Raises:
            ValueError: for a scheme or a tensor with which it cannot, with the name of the tensor.
        """
        self.check()
        for prefix, component in [*zip(self.prefixes, parts, strict=True), *((INPUT, t) for t in transforms)]:
            component.validate(prefix)

    def to_json(self) -> dict[str, Any]:
        """Convert the scheme to plain values."""
        transforms = [t.to_json() for t in self.transforms]
        values = {"shape": list(self.shape), "parts": [part.to_json() for part in self.parts]}
        values |= {"transforms": transforms} if transforms else {}
        return values | ({} if self.role == "linear" else {"role": self.role})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a scheme from the values of `to_json`.

        Raises:
            ValueError: for values that do not describe a layer.
        """
        field_names = {"shape", "parts", "transforms", "role"}
        if not isinstance(values, Mapping) or not {"shape", "parts"} <= values.keys() <= field_names:
            raise ValueError(
                f"{str(values)[:100]!r} describes no layer; its fields are shape, parts, transforms and role"
            )
        shape, lists = values["shape"], (values["parts"], values.get("transforms", []))
        if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(n, int) for n in shape):
            raise ValueError(f"shape is {str(shape)[:100]}, but it must be two numbers: outputs and inputs")
        if not all(isinstance(scheme_list, list) for scheme_list in lists) or not lists[0]:
            raise ValueError("parts must be a list with at least one part, transforms a list")
        for key, scheme_list in zip(("parts", "transforms"), lists, strict=True):
            if len(scheme_list) > MOST_PARTS:  # before they are read
                raise ValueError(f"a layer has {len(scheme_list)} {key}, but it must have at most {MOST_PARTS}")
        parts, transforms = (tuple(read_scheme(scheme_list) for scheme_list in scheme_list) for scheme_list in lists)
        scheme = cls((shape[0], shape[1]), parts, transforms, values.get("role", "linear"))
        scheme.check()
        return scheme

    def check(self) -> None:
        """Check a description that was read from a file.

        Raises:
            ValueError: for a description that no layer can have.
        """
        if not all(1 <= size <= LARGEST_SIZE for size in self.shape):
            raise ValueError(f"shape is {list(self.shape)}, but outputs and inputs must be from 1 to {LARGEST_SIZE}")
        if self.role not in ROLES:
            raise ValueError(f"role {str(self.role)[:100]!r} is none of {', '.join(ROLES)}")
        kinds = (self.parts, PartScheme), (self.transforms, TransformScheme)
        if wrong := [scheme.kind for schemes, kind in kinds for scheme in schemes if not isinstance(scheme, kind)]:
            raise ValueError(f"{wrong[0]} stands among parts, but is a transform, or the other way round")
        if len({scheme.kind for scheme in self.transforms}) < len(self.transforms):
            raise ValueError("a layer has at most one transform of each kind")
        for scheme in (*self.parts, *self.transforms):
            scheme.check()
        if reason := self.refused:
            raise ValueError(reason)

    @property
    def refused(self) -> str | None:
        """Why a layer of this shape cannot have one of its parts or transforms; None if it can have all."""
        reasons = (scheme.refuses(self.shape) for scheme in (*self.parts, *self.transforms))
        return next((reason for reason in reasons if reason is not None), None)


def transform_class(kind: str) -> type[InputTransform]:
    """Return the component class of a kind of transform."""
    component = COMPONENTS[kind]
    assert issubclass(component, InputTransform)
    return component


def layer_tensors(
    parts: Sequence[WeightPart], transforms: Sequence[InputTransform], prefixes: Sequence[str]
) -> dict[str, Tensor]:
    """Return all tensors of a layer by their names inside it."""
    owners = [*zip(prefixes, parts, strict=True), *((INPUT, t) for t in transforms)]
    return {stored_name(p, name): tensor for p, component in owners for name, tensor in component.tensors().items()}


def only_codes(parts: Sequence[WeightPart]) -> CodesPart | None:
    """Return the codes of a weight whose only part is codes; None for other weights."""
    part = parts[0] if len(parts) == 1 else None
    return part if isinstance(part, CodesPart) else None


def find_rounding(transforms: Sequence[InputTransform]) -> InputRounding | None:
    """Return the activation quantizer among the transforms of a layer, or None."""
    return next((t for t in transforms if isinstance(t, InputRounding)), None)
