"""A permutation of the input channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Self

from compress.layers.base import InputTransform, TensorSpec, TransformScheme, stored_name


@dataclass(frozen=True)
class PermutationScheme(TransformScheme):
    """A permutation of all input channels."""

    kind: ClassVar[str] = "permutation"
    effect: ClassVar[str] = "its inputs are permuted, and no layer before it could absorb the permutation"
    instead: ClassVar[str] = ", or unlinked: skip for the permutation"
    undone: ClassVar[str] = (
        "stored dense, so the permutation of its columns is undone: N:M no longer holds in consecutive columns"
    )

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        return {"permutation": TensorSpec((shape[1],), torch.int32)}


class InputPermutation(InputTransform):
    """x[order]: channel j of the result is channel order[j] of the input.

    Attributes:
        order: [in].
    """

    kind: ClassVar[str] = "permutation"
    names: ClassVar[Mapping[str, str]] = {"order": "permutation"}
    rank: ClassVar[int] = 0

    order: Int[Tensor, " in"]

    @classmethod
    def of(cls, order: Int[Tensor, " in"], shape: tuple[int, int]) -> Self:
        """Create the transform from an order."""
        return cls(PermutationScheme(), shape, {"order": order.to(torch.int32)})

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        return x.index_select(-1, self.order)

    def absorbed(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        return weight[:, self.order.argsort()].contiguous()

    def validate(self, prefix: str) -> None:
        super().validate(prefix)
        width = self.shape[1]
        if not torch.equal(self.order.long().sort().values, torch.arange(width, device=self.order.device)):
            raise ValueError(f"{stored_name(prefix, 'permutation')} does not hold each number below {width} once")
