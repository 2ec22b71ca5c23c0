"""The contract of the components of a layer: parts of its weight, and transforms of its input.

A layer computes y = sum over its parts of part.product(t(x)) + bias. Each kind of component is one file with two
classes: a scheme, which is a frozen description in plain JSON, and a component, which holds the tensors that the scheme
describes. Plan, formats, loading and reports work with schemes and with this contract; none of them names a kind.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from math import prod
from typing import Any, ClassVar, Generic, Literal

import torch
from jaxtyping import Float, Int
from pydantic import ValidationError
from torch import Tensor, nn
from typing_extensions import Self, TypeVar

from compress.errors import did_you_mean
from compress.kernels import dispatch
from compress.layers.fields import validators
from compress.numerics.dtypes import DTYPES, bytes_of, is_finite
from compress.numerics.quant.grids import Grid
from compress.numerics.sparse.positions import KeptRows, PackedMask, Value

SCHEMES: dict[str, type[Scheme]] = {}
"""Every kind of scheme by its name; a class is registered when it is defined."""

COMPONENTS: dict[str, type[Component]] = {}
"""Every kind of component by the name of its scheme."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a stored tensor.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the tensor; None stands for the storage dtype of the run.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def size_bytes(self, storage: torch.dtype) -> int:
        """Return the size of the tensor in bytes."""
        return prod(self.shape) * (self.dtype or storage).itemsize


def stored_name(prefix: str, name: str) -> str:
    """Join prefix and name by '_': 'weight_scale' for ('weight', 'scale'), 'weight' for ('weight', '')."""
    return "_".join(part for part in (prefix, name) if part)


def plain(value: Any) -> Any:
    """Convert a field of a specification to plain JSON: grids become names, specifications become mappings."""
    if isinstance(value, Specification):
        return value.to_json()
    if isinstance(value, Grid):
        return value.name
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Specification(ABC):
    """A frozen value that checkpoints state as plain JSON: a scheme of a layer, or a cache policy.

    Attributes:
        kind: name of the file that defines the class.
        readers: functions that read fields from JSON, for fields that are not plain values.
    """

    kind: ClassVar[str]
    readers: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    def to_json(self) -> dict[str, Any]:
        """Convert the value to plain JSON; fields that equal their default are omitted."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        non_default_values = {
            name: plain(v) for name, v in values.items() if name not in defaults or v != defaults[name]
        }
        return {"kind": self.kind, **non_default_values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a value from the result of `to_json`.

        Raises:
            ValueError: for an unknown field, a missing field or an invalid value.
        """
        is_required, field_values = {f.name: f.default is MISSING for f in fields(cls)}, dict(values)
        field_values.pop("kind", None)
        if unknown := sorted(field_values.keys() - is_required.keys()):
            raise ValueError(f"{cls.kind} has no field {unknown[0]!r}{did_you_mean(unknown[0], is_required)}")
        if missing := sorted(name for name, required in is_required.items() if required and name not in field_values):
            raise ValueError(f"{cls.kind} lacks its field {missing[0]!r}")
        specification = cls(**{name: cls.readers.get(name, _identity)(value) for name, value in field_values.items()})
        specification.check()
        return specification

    def check(self) -> None:
        """Check the fields of a value that was read from a file.

        Raises:
            ValueError: for a field of a wrong type, or a count below 1 that is not the default.
        """
        defaults = {f.name: f.default for f in fields(self)}
        for name, hint in validators(type(self)).items():
            value = getattr(self, name)
            try:
                hint.validate_python(value)
            except ValidationError as error:
                raise ValueError(f"{name} of {self.kind} is {value!r}: {error.errors()[0]['msg']}") from error
            if isinstance(value, int) and not isinstance(value, bool) and value < 1 and value != defaults[name]:
                raise ValueError(f"{name} of {self.kind} is {value}, but it must be at least 1")
            if isinstance(value, Specification):
                value.check()


@dataclass(frozen=True)
class Scheme(Specification):
    """A frozen description of a component. A scheme and its tensors determine the component."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):
            SCHEMES[cls.kind] = cls

    @abstractmethod
    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """Return the specifications of the component's tensors by name.

        Args:
            shape: (out, in) of the layer.
        """

    def refuses(self, shape: tuple[int, int]) -> str | None:
        """Return why a layer of this shape cannot have the component and how to change the recipe; None if it can.

        Plans ask this before a run, and `LayerScheme.check` asks it about a scheme that was read from a file.
        """
        return None

    @property
    def text(self) -> str:
        """A short text for tables, such as 'int4, group 64'."""
        return self.kind

    def size_bytes(self, shape: tuple[int, int], storage: torch.dtype) -> int:
        """Return the size of all tensors in bytes.

        Args:
            shape: (out, in) of the layer.
            storage: dtype of tensors that have no fixed dtype.
        """
        return sum(spec.size_bytes(storage) for spec in self.tensors(shape).values())


def _identity(value: Any) -> Any:
    return value


def read_scheme(values: Any) -> Any:
    """Read a scheme of any kind from the values of `Scheme.to_json`.

    Raises:
        ValueError: for values that do not describe a scheme.
    """
    kind = values.get("kind") if isinstance(values, Mapping) else None
    if not isinstance(kind, str) or kind not in SCHEMES:
        raise ValueError(f"{str(values)[:100]!r} describes no part or transform; kinds: {', '.join(sorted(SCHEMES))}")
    return SCHEMES[kind].from_json(values)


@dataclass(frozen=True)
class PartScheme(Scheme):
    """The description of a part of a weight."""

    @property
    def quantized(self) -> bool:
        """Whether the weights of the part are codes of a grid."""
        return False

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grids of the part's codes."""
        return ()

    def tensors(self, shape: tuple[int, int], lattice: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        """Return the specifications of the part's tensors by name.

        Args:
            shape: (out, in) of the layer.
            lattice: shape of the stored weights of a packed sparse part; None for a part that stores all weights.
        """
        raise NotImplementedError

    @property
    def scale_groups(self) -> int | Literal["channel", "tensor"] | None:
        """Number of columns that share a scale, 'channel' or 'tensor'; None for a part without scales."""
        return None

    @property
    def free_scales(self) -> bool:
        """Whether the scales are floats that training may change."""
        return False

    def value(self, storage: torch.dtype) -> Value | None:
        """Return the storage of one weight: a dtype, or a number of bits.

        Returns:
            None for a part that cannot be packed sparsely.
        """
        return None


@dataclass(frozen=True)
class TransformScheme(Scheme):
    """The description of a transform of the input.

    Attributes:
        effect: effect on the inputs, for errors of formats that cannot store the transform.
        instead: how a user can avoid the transform, for the same errors.
        undone: note for the journal when the transform is folded into a dense weight; empty for no note.
    """

    effect: ClassVar[str] = "its inputs have a transform"
    instead: ClassVar[str] = ""
    undone: ClassVar[str] = ""


SchemeT = TypeVar("SchemeT", bound=Scheme, default=Scheme, covariant=True)
PartSchemeT = TypeVar("PartSchemeT", bound=PartScheme, default=PartScheme, covariant=True)
TransformSchemeT = TypeVar("TransformSchemeT", bound=TransformScheme, default=TransformScheme, covariant=True)


class Component(nn.Module, ABC, Generic[SchemeT]):
    """Tensors and their scheme. A component is immutable: a change creates a new component.

    Attributes:
        kind: kind of the scheme.
        names: stored name of every buffer, as in the scheme.
        shape: (out, in) of the layer.
    """

    kind: ClassVar[str]
    names: ClassVar[Mapping[str, str]] = {}

    scheme: SchemeT
    shape: tuple[int, int]

    @property
    def casts(self) -> bool:
        """Whether `module.to(dtype)` casts the floats; scales of codes, for example, keep their stored dtype."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):
            COMPONENTS[cls.kind] = cls

    def __init__(self, scheme: SchemeT, shape: tuple[int, int], tensors: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        self.scheme, self.shape = scheme, shape
        for buffer in self.names:
            self.register_buffer(buffer, tensors.get(buffer))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # moved or cast
        def convert(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            return converted if self.casts or converted.dtype == tensor.dtype else tensor.to(converted.device)

        for child in self.children() if recurse else ():
            child._apply(fn)
        return super()._apply(convert, recurse=False)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their names in a checkpoint."""
        tensor_by_name = {name: getattr(self, buffer) for buffer, name in self.names.items()}
        return {name: tensor for name, tensor in tensor_by_name.items() if tensor is not None}

    @classmethod
    def read(cls, scheme: Any, shape: tuple[int, int], tensors: Mapping[str, Tensor], prefix: str) -> Self:
        """Rebuild the component exactly from the tensors of its layer; `validate` checks their values.

        Args:
            scheme: scheme of the component.
            shape: (out, in) of the layer.
            tensors: tensors of the layer, named `stored_name(prefix, name)`.
            prefix: prefix of the component's names.

        Raises:
            KeyError: for a missing tensor.
            ValueError: for a tensor of another shape or dtype.
        """
        scheme_tensors = checked(scheme.tensors(shape), tensors, prefix)
        return cls(scheme, shape, {buffer: scheme_tensors.get(name) for buffer, name in cls.names.items()})

    def validate(self, prefix: str) -> None:
        """Check the values of the tensors, whose shapes and dtypes are those of the scheme.

        Args:
            prefix: prefix of the stored names, for errors.

        Raises:
            ValueError: for floats that are not finite, and for values that contradict each other or the scheme.
        """
        for name, tensor in self.tensors().items():
            if tensor.is_floating_point() and not is_finite(tensor):
                raise ValueError(f"{stored_name(prefix, name)} holds a number that is not finite")

    def sha256(self) -> str:
        """Return a digest of scheme, shape and tensors; equal for bit-identical components."""
        digest = hashlib.sha256(f"{self.scheme.to_json()} {self.shape}".encode())
        for name, tensor in self.tensors().items():
            digest.update(name.encode() + bytes_of(tensor.cpu()).numpy().tobytes())
        return digest.hexdigest()


def checked(specs: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Select the tensors of a scheme among those of a layer, and check their shapes and dtypes.

    Args:
        specs: specifications by name, as of `Scheme.tensors`.
        tensors: tensors of the layer by stored name.
        prefix: prefix of the stored names.

    Returns:
        The tensors by their names in the scheme.

    Raises:
        KeyError: for a missing tensor.
        ValueError: for a shape or dtype other than the scheme's.
    """
    scheme_tensors: dict[str, Tensor] = {}
    for name, spec in specs.items():
        stored_key = stored_name(prefix, name)
        tensor = tensors[stored_key]
        if spec.dtype is None and tensor.dtype not in DTYPES.values():
            raise ValueError(f"{stored_key} holds {tensor.dtype}, not floats ({', '.join(DTYPES)})")
        expected_dtype = spec.dtype or tensor.dtype
        if tuple(tensor.shape) != spec.shape or tensor.dtype != expected_dtype:
            actual = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{stored_key} is {actual}, but it must be {expected_dtype} {list(spec.shape)}")
        scheme_tensors[name] = tensor
    return scheme_tensors


class WeightPart(Component[PartSchemeT]):
    """One summand of the weight of a layer.

    Attributes:
        lattice: shape of the stored weights: (out, in), or `Sparsity.values` of packed sparse weights.
        narrow_inputs: whether kernels may round float32 inputs to bfloat16; set before the first product.
    """

    def __init__(self, scheme: PartSchemeT, shape: tuple[int, int], tensors: Mapping[str, Tensor | None]) -> None:
        super().__init__(scheme, shape, tensors)
        self.lattice: tuple[int, ...] = shape
        self.narrow_inputs = False  # kernels may round float32 inputs to bfloat16; set before the first product
        self._prepared: dict[int, Any] = {}
        self.register_load_state_dict_post_hook(WeightPart.forget_prepared)

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, or of the decoded scales of codes."""

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """Dequantize the part in `dtype`."""

    def rows_at(self, ids: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "n in"]:
        """Dequantize the rows `ids` in `dtype`; bit-identical to those of `dense`."""
        return self.dense(dtype)[ids]

    def product(self, x: Float[Tensor, "*batch in"], bias: Tensor | None = None) -> Float[Tensor, "*batch out"]:
        """Compute x W^T + bias in plain torch. Kernels are tested against it."""
        return nn.functional.linear(x, self.dense(x.dtype), bias)

    def prepared(self, kernel: dispatch.Kernel) -> Any:
        """Return the result of `kernel.prepare` for the part; it is cached until the tensors change."""
        key = id(kernel)
        if key not in self._prepared:
            self._prepared[key] = kernel.prepare(self)
        return self._prepared[key]

    def is_prepared(self, kernel: dispatch.Kernel) -> bool:
        """Return whether the result of `kernel.prepare` is cached."""
        return id(kernel) in self._prepared

    def forget_prepared(self, keys: Any = None) -> None:
        """Drop the cached results of `Kernel.prepare`; also a hook after `load_state_dict`."""
        self._prepared = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # moved or cast
        self.forget_prepared()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the cached results of kernels."""
        return {**self.__dict__, "_prepared": {}}

    def in_storage(self, dtype: torch.dtype) -> WeightPart:
        """Cast the floats of the part, such as scales and float zero points, to the storage dtype.

        The values do not change if the pass computed them for that dtype.
        """
        return self

    def round_to(self, dtype: torch.dtype) -> None:
        """Round float weights to the values of `dtype` in place; the dtype of the tensor does not change."""

    def vanished(self, weight: Float[Tensor, "out in"]) -> int:
        """Count the groups of the original `weight` that became zero because no scale is small enough."""
        return 0

    # Packed sparse weights

    @property
    def kept(self) -> PackedMask | None:
        """The positions of packed sparse weights; None for a part that stores all weights."""
        return None

    def gathered(self, positions: PackedMask) -> WeightPart:
        """Return a part of the same kind that stores the weights at `positions` only.

        Only for schemes whose `value` is not None.
        """
        raise AssertionError(f"a part of kind {self.kind} cannot leave weights out")

    def kept_rows(self, part: KeptRows, dtype: torch.dtype) -> Float[Tensor, "rows in"]:
        """Dequantize some rows of a `gathered` part; weights outside of the mask are zero."""
        raise AssertionError(f"a part of kind {self.kind} cannot leave weights out")

    # Training

    @property
    def free_scale(self) -> Float[Tensor, "out groups"] | None:
        """The scales that training may change; None for a part without such scales."""
        return None

    def with_scale(self, scale: Float[Tensor, "out groups"]) -> WeightPart:
        """Return the part with other scales; only if `free_scale` is not None."""
        raise AssertionError(f"a part of kind {self.kind} has no scales")

    def spread(self, per_group: Float[Tensor, "out groups"]) -> Float[Tensor, "out in"]:
        """Expand a value per scale to a value per weight, or to a shape that broadcasts to it."""
        raise AssertionError(f"a part of kind {self.kind} has no scales")

    def sum_groups(self, values: Float[Tensor, "out in"]) -> Float[Tensor, "out groups"]:
        """Sum over the weights of each scale; the adjoint of `spread`."""
        raise AssertionError(f"a part of kind {self.kind} has no scales")


class InputTransform(Component[TransformSchemeT]):
    """A map of the input of a layer, applied before the product with the weight.

    Attributes:
        rank: transforms are applied in ascending order of rank.
        linear: whether `absorbed` can fold the transform into the weight.
        keeps_zeros: whether `absorbed` preserves the positions of zeros.
        mixes: whether a column of the weight belongs to several input channels; it cannot be scaled or pruned for one
            of them.
        in_kernel: whether kernels apply the transform together with the product.
    """

    rank: ClassVar[int]
    linear: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = False
    mixes: ClassVar[bool] = False
    in_kernel: ClassVar[bool] = False

    @abstractmethod
    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        """Transform the input; the dtype of x is preserved."""

    def absorbed(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Fold the transform t into the weight W, so that W' x = W t(x). Only for linear transforms."""
        raise AssertionError(f"a transform of kind {self.kind} is not linear")

    def permuted(self, order: Int[Tensor, " in"]) -> InputTransform:
        """Return the transform for permuted inputs, whose channel j is channel order[j] of the original."""
        return self
