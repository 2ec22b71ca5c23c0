"""An online Hadamard transform of the input, which spreads outliers over all channels of a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Self

from compress.kernels import dispatch
from compress.layers.base import InputTransform, TensorSpec, TransformScheme, stored_name
from compress.numerics.hadamard import fits, signs_of, transformed


@dataclass(frozen=True)
class HadamardScheme(TransformScheme):
    """An orthonormal Hadamard matrix for every run of `block` channels, after random signs of the channels.

    QuaRot (arXiv 2404.00456), section 4, stage 1d; the signs make it randomized, as in QuIP# (arXiv 2402.04396).

    Attributes:
        block: order of the Hadamard matrix.
    """

    kind: ClassVar[str] = "hadamard"
    effect: ClassVar[str] = "its inputs are multiplied by a Hadamard matrix when it runs"
    instead: ClassVar[str] = ", or leave the layer out of online"
    undone: ClassVar[str] = "stored dense, so the Hadamard transform of its inputs is folded back into its weight"

    block: int

    @property
    def text(self) -> str:
        return f"inputs rotated in blocks of {self.block}"

    def refuses(self, shape: tuple[int, int]) -> str | None:
        if not fits(self.block, shape[1]):
            return f"a Hadamard matrix of order {self.block} does not fit {shape[1]} inputs; leave it out of online"
        return None

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        return {"hadamard_signs": TensorSpec((shape[1],), torch.int8)}


class Hadamard(InputTransform[HadamardScheme]):
    """(x * signs) H / sqrt(block), computed in float32 and returned in the dtype of x.

    Attributes:
        signs: [in], 1 or -1.
    """

    kind: ClassVar[str] = "hadamard"
    names: ClassVar[Mapping[str, str]] = {"signs": "hadamard_signs"}
    rank: ClassVar[int] = -1  # scales and permutations of later passes are for the rotated columns
    mixes: ClassVar[bool] = True

    signs: Int[Tensor, " in"]

    @classmethod
    def of(cls, block: int, seed: int, shape: tuple[int, int]) -> Self:
        """Rotate blocks of channels.

        Args:
            block: order of a Hadamard matrix; it divides the number of inputs.
            seed: seed of the signs.
            shape: (out, in) of the layer.
        """
        assert fits(block, shape[1]), "the block must be an order of a Hadamard matrix"
        return cls(HadamardScheme(block), shape, {"signs": signs_of(shape[1], seed)})

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        return dispatch.transformed(self, x)

    def plain(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        """Compute the transform in plain torch. Kernels are tested against it."""
        return transformed(x.float() * self.signs, self.scheme.block).to(x.dtype)

    def absorbed(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Compute W' = W H^T diag(signs): x W'^T = (x diag(signs) H) W^T."""
        return (transformed(weight.float(), self.scheme.block, inverse=True) * self.signs).to(weight.dtype)

    def validate(self, prefix: str) -> None:
        if not bool((self.signs.abs() == 1).all()):
            raise ValueError(f"{stored_name(prefix, 'hadamard_signs')} holds other numbers than 1 and -1")
