"""Base of parts whose weight is decoded values times a scale per row, with rows that may be rotated.

scale    float [out]   a factor per row
signs    int8 [out]    only with rotated rows: signs of the outputs

W = decoded * scale; with rotated rows W = diag(signs) H decoded * scale, with H an orthonormal Hadamard matrix for
every `rotated` rows.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Self, TypeVar

from compress.layers.base import PartScheme, TensorSpec, WeightPart, stored_name
from compress.numerics.hadamard import fits, transformed


class ScaledRowsScheme(PartScheme):
    """The scheme of a part with a scale per row.

    Attributes:
        rotated: order of the Hadamard matrix that rotates the rows; None for rows that are not rotated.
    """

    rotated: int | None

    @property
    def quantized(self) -> bool:
        return True

    @property
    def free_scales(self) -> bool:
        return self.rotated is None

    def refuses_rotation(self, rows: int) -> str | None:
        """Return why a layer with this number of outputs cannot be rotated; None if it can, or is not rotated."""
        if self.rotated is not None and not fits(self.rotated, rows):
            return f"a Hadamard matrix of order {self.rotated} does not fit its {rows} outputs; use rotate: inputs"
        return None

    def tensors_of_rows(self, rows: int) -> dict[str, TensorSpec]:
        """Return the specifications of the scales and the signs."""
        specs = {"scale": TensorSpec((rows,))}
        return specs if self.rotated is None else {**specs, "signs": TensorSpec((rows,), torch.int8)}


RowsSchemeT = TypeVar("RowsSchemeT", bound=ScaledRowsScheme, default=ScaledRowsScheme, covariant=True)


class ScaledRowsPart(WeightPart[RowsSchemeT]):
    """Decoded values times a scale per row."""

    scale: Float[Tensor, " out"]
    signs: Int[Tensor, " out"] | None

    @abstractmethod
    def decoded(self, ids: Int[Tensor, " n"] | None = None) -> Float[Tensor, "rows in"]:
        """Decode the values of the rows `ids` (None: of all rows) without their scales."""

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        weight = self.decoded().to(dtype) * self.scale.to(dtype)[:, None]
        return weight if self.signs is None else rotated_back(weight, self.signs, self.scheme.rotated)

    def rows_at(self, ids: Int[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, "n in"]:
        if self.signs is not None:
            return self.dense(dtype)[ids]
        return self.decoded(ids).to(dtype) * self.scale[ids].to(dtype)[:, None]

    def in_storage(self, dtype: torch.dtype) -> Self:
        return self._with(scale=self.scale.to(dtype))

    def _with(self, **changed: Tensor) -> Self:
        """Return the part with some buffers replaced."""
        return type(self)(self.scheme, self.shape, {name: getattr(self, name) for name in self.names} | changed)

    def validate(self, prefix: str) -> None:
        super().validate(prefix)
        if self.signs is not None and not bool((self.signs.abs() == 1).all()):
            raise ValueError(f"{stored_name(prefix, 'signs')} holds other numbers than 1 and -1")

    # Training: a scale is a factor of the weights of its row, unless the rows are rotated

    @property
    def free_scale(self) -> Float[Tensor, "out 1"] | None:
        return self.scale[:, None] if self.scheme.free_scales else None

    def with_scale(self, scale: Float[Tensor, "out 1"]) -> Self:
        return self._with(scale=scale[:, 0])

    def spread(self, per_group: Float[Tensor, "out 1"]) -> Float[Tensor, "out 1"]:
        return per_group

    def sum_groups(self, values: Float[Tensor, "out in"]) -> Float[Tensor, "out 1"]:
        return values.sum(1, keepdim=True)


def rotated_rows(weight: Float[Tensor, "out in"], signs: Int[Tensor, " out"], order: int | None) -> Tensor:
    """Rotate the rows of a weight: H^T diag(signs) W."""
    assert order is not None
    return transformed((weight * signs[:, None]).T, order).T.contiguous()


def rotated_back(weight: Float[Tensor, "out in"], signs: Int[Tensor, " out"], order: int | None) -> Tensor:
    """Invert `rotated_rows`."""
    assert order is not None
    return transformed(weight.T, order, inverse=True).T * signs[:, None]
