"""Packed sparse weights with their positions: N of every M columns, or a bitmask.

Every row has K = floor(I/M) whole groups; the I - K*M columns after them are all kept.

              N:M                        bitmask
    kept      int32 [O, ceil(K*N*i/32)]  int32 [O, ceil(I/32)]    N:M: the column in its group of every kept weight of
                                                                  the groups, ascending, in i = ceil(log2 M) bits (M up
                                                                  to 256). bitmask: a bit per column, 1 for kept. Bit
                                                                  streams row by row, least significant bit first
    values    float [O, K*N + I - K*M]   float [kept]             weights in floats
    packed    int32 [O, ceil(v*b/32)]    int32 [ceil(kept*b/32)]  or codes, v = K*N + I - K*M; scales, zero points and
                                                                  group indexes are those of the whole matrix
                                                                  (`parts.codes`)

The mask is independent of zeros: a kept weight that is zero is stored like any other. Weights outside of the mask are
exactly zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Self

from compress.layers.base import COMPONENTS, PartScheme, TensorSpec, WeightPart, checked, read_scheme, stored_name
from compress.numerics.quant.grids import Grid
from compress.numerics.sparse.positions import LARGEST_M, PackedMask, SparseLayout

VALUES = "values"
"""The stored name of packed sparse weights that are floats."""


@dataclass(frozen=True)
class SparseScheme(PartScheme):
    """Packed sparse weights.

    Attributes:
        sparsity: pattern of the positions and number of weights.
        values: scheme of the stored weights, such as floats or codes.
    """

    kind: ClassVar[str] = "sparse"

    sparsity: SparseLayout
    values: PartScheme

    @property
    def quantized(self) -> bool:
        return self.values.quantized

    @property
    def grids(self) -> tuple[Grid, ...]:
        return self.values.grids

    @property
    def free_scales(self) -> bool:
        return self.values.free_scales

    @property
    def scale_groups(self) -> int | Literal["channel", "tensor"] | None:
        return self.values.scale_groups

    @property
    def text(self) -> str:
        return f"{self.values.text}, {self.sparsity.text}" if self.quantized else self.sparsity.text

    def refuses(self, shape: tuple[int, int]) -> str | None:
        rows, width = shape
        pattern, count = self.sparsity.n_of_m, self.sparsity.kept
        if pattern is not None and pattern[1] > width:
            return f"its {width} inputs have no group of {pattern[1]} weights, but the pattern is {self.sparsity.text}"
        if pattern is not None and self.sparsity != (regular := SparseLayout.regular(shape, *pattern)):
            return f"{self.sparsity.text} keeps {regular.kept} of its {rows} x {width} weights, not {count}"
        if count > rows * width:
            return f"{count} weights cannot be kept of its {rows} x {width}"
        return self.values.refuses(shape)

    def tensors(self, shape: tuple[int, int], lattice: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        positions = TensorSpec((shape[0], self.sparsity.words(shape[1])), torch.int32)
        inner = self.values.tensors(shape, self.sparsity.values(shape))
        return {"kept": positions, **{name or VALUES: spec for name, spec in inner.items()}}

    def to_json(self) -> dict[str, Any]:
        positions = {"pattern": self.sparsity.text, "kept": self.sparsity.kept}
        return {"kind": self.kind, **positions, "values": self.values.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        fields = {"kind", "pattern", "kept", "values"}
        if values.keys() != fields:
            raise ValueError(
                f"the fields of {cls.kind} are {', '.join(sorted(fields))}, not {', '.join(sorted(values))}"
            )
        pattern, kept_count, inner = values["pattern"], values["kept"], read_scheme(values["values"])
        if not isinstance(kept_count, int) or kept_count < 0:
            raise ValueError(f"kept of {cls.kind} is {kept_count!r}, but it must be a number of weights")
        if not isinstance(inner, PartScheme) or inner.value(torch.float32) is None:
            raise ValueError(f"weights of kind {inner.kind} cannot be the values of {cls.kind}")
        scheme = cls(_named(pattern, kept_count), inner)
        scheme.check()
        return scheme


def _named(pattern: Any, kept_count: int) -> SparseLayout:
    """Return the sparsity of a pattern by its text.

    Raises:
        ValueError: for an unknown pattern.
    """
    n, _, m = str(pattern).partition(":")
    is_n_of_m = n.isascii() and m.isascii() and n.isdigit() and m.isdigit() and len(m) <= 3
    if pattern != "bitmask" and not (is_n_of_m and 0 < int(n) < int(m) <= LARGEST_M):
        raise ValueError(f"pattern {str(pattern)[:100]!r} is not known; it is bitmask, or N:M with M up to {LARGEST_M}")
    return SparseLayout.named(pattern, kept_count)


class SparsePart(WeightPart[SparseScheme]):
    """Packed sparse weights.

    Attributes:
        positions: packed positions (`PackedMask.words`).
        values: part that stores the weights at these positions.
    """

    kind: ClassVar[str] = "sparse"
    names: ClassVar[Mapping[str, str]] = {"positions": "kept"}

    positions: Int[Tensor, "out words"]

    def __init__(
        self, scheme: SparseScheme, shape: tuple[int, int], tensors: Mapping[str, Tensor | None], values: WeightPart
    ) -> None:
        super().__init__(scheme, shape, tensors)
        self.values = values

    @classmethod
    def of(cls, part: WeightPart, positions: PackedMask) -> Self:
        """Pack the weights of a part at the positions of `positions`; all other weights must be zero."""
        scheme = SparseScheme(positions.sparsity, part.scheme)
        return cls(scheme, part.shape, {"positions": positions.words}, part.gathered(positions))

    @classmethod
    def read(cls, scheme: SparseScheme, shape: tuple[int, int], tensors: Mapping[str, Tensor], prefix: str) -> Self:
        scheme_tensors = checked(scheme.tensors(shape), tensors, prefix)
        value_class = COMPONENTS[scheme.values.kind]
        buffers = {buffer: scheme_tensors.get(name or VALUES) for buffer, name in value_class.names.items()}
        values = value_class(scheme.values, shape, buffers)
        assert isinstance(values, WeightPart)
        values.lattice = scheme.sparsity.values(shape)
        return cls(scheme, shape, {"positions": scheme_tensors["kept"]}, values)

    def validate(self, prefix: str) -> None:
        self.kept.check(stored_name(prefix, "kept"))
        self.values.validate(prefix)

    def tensors(self) -> dict[str, Tensor]:
        return {"kept": self.positions, **{name or VALUES: tensor for name, tensor in self.values.tensors().items()}}

    def with_values(self, values: WeightPart) -> SparsePart:
        """Return a part with the same positions and other values."""
        return SparsePart(self.scheme, self.shape, {"positions": self.positions}, values)

    @property
    def kept(self) -> PackedMask:
        return PackedMask(self.positions, self.scheme.sparsity, self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        weight = torch.empty(self.shape, dtype=dtype, device=self.positions.device)
        for part in self.kept.parts():  # some rows at a time, to limit memory
            weight[part.rows] = self.values.kept_rows(part, dtype)
        return weight

    def in_storage(self, dtype: torch.dtype) -> SparsePart:
        return self.with_values(self.values.in_storage(dtype))

    def round_to(self, dtype: torch.dtype) -> None:
        self.values.round_to(dtype)

    @property
    def free_scale(self) -> Float[Tensor, "out groups"] | None:
        return self.values.free_scale

    def with_scale(self, scale: Float[Tensor, "out groups"]) -> SparsePart:
        return self.with_values(self.values.with_scale(scale))

    def spread(self, per_group: Float[Tensor, "out groups"]) -> Float[Tensor, "out in"]:
        return self.values.spread(per_group)

    def sum_groups(self, values: Float[Tensor, "out in"]) -> Float[Tensor, "out groups"]:
        return self.values.sum_groups(values)
