"""Division of input channels by a scale."""

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
class ScaleScheme(TransformScheme):
    """A scale per input channel, stored in float32."""

    kind: ClassVar[str] = "scale"
    effect: ClassVar[str] = "its inputs are divided by a scale that no layer before it could absorb"
    instead: ClassVar[str] = ", or unlinked: leave for the scale"

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        return {"channel_scale": TensorSpec((shape[1],), torch.float32)}


class Scale(InputTransform):
    """x / scale, computed in float32 and returned in the dtype of x.

    Attributes:
        scale: [in], float32.
    """

    kind: ClassVar[str] = "scale"
    names: ClassVar[Mapping[str, str]] = {"scale": "channel_scale"}
    rank: ClassVar[int] = 1
    keeps_zeros: ClassVar[bool] = True

    scale: Float[Tensor, " in"]

    @classmethod
    def of(cls, scale: Float[Tensor, " in"], shape: tuple[int, int]) -> Self:
        """Create the transform from a scale."""
        return cls(ScaleScheme(), shape, {"scale": scale})

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        return (x / self.scale).to(x.dtype)

    def absorbed(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        return (weight.float() / self.scale).to(weight.dtype)

    def validate(self, prefix: str) -> None:
        super().validate(prefix)
        if not bool(self.scale.all()):
            raise ValueError(f"{stored_name(prefix, 'channel_scale')} holds a zero, by which inputs are divided")

    def permuted(self, order: Int[Tensor, " in"]) -> Scale:
        return Scale.of(self.scale[order], self.shape)
