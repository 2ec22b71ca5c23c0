"""Reassembly of input channels: similar channels are merged, and the freed places take parts of large ones."""

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
class ReassemblyScheme(TransformScheme):
    """Each channel of the result is a multiple of a channel of the input, or of the sum of two (Liu 2023, QLLM).

    reassembly_first, reassembly_second: the channels of the input; equal where it is one. reassembly_scale: the factor
    of their sum.
    """

    kind: ClassVar[str] = "reassembly"
    effect: ClassVar[str] = "its input channels are split and merged when it runs"

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        index = TensorSpec((shape[1],), torch.int32)
        scale = TensorSpec((shape[1],), torch.float32)
        return {"reassembly_first": index, "reassembly_second": index, "reassembly_scale": scale}


class Reassembly(InputTransform):
    """(x[first] + x[second]) * scale, computed in float32 and returned in the dtype of x. All tensors: [in]."""

    kind: ClassVar[str] = "reassembly"
    names: ClassVar[Mapping[str, str]] = {
        "first": "reassembly_first",
        "second": "reassembly_second",
        "scale": "reassembly_scale",
    }
    rank: ClassVar[int] = -1  # scales and permutations of later passes are for the reassembled columns
    mixes: ClassVar[bool] = True

    first: Int[Tensor, " in"]
    second: Int[Tensor, " in"]
    scale: Float[Tensor, " in"]

    @classmethod
    def of(cls, pairs: Int[Tensor, "n 2"], parts: Int[Tensor, " in"], shape: tuple[int, int]) -> Self:
        """Merge pairs of channels into the first of each, and put the parts of large channels into the freed places.

        parts: the number of sub-channels of each channel, T_i of x_i / T_i; there are as many further ones as pairs.
        """
        first = torch.arange(shape[1])
        second, scale = first.clone(), 0.5 / parts.float()
        kept, freed = pairs[:, 0], pairs[:, 1]
        second[kept] = freed
        further = first.repeat_interleave(parts - 1)
        assert len(further) == len(freed) and bool((parts[pairs.flatten()] == 1).all()), "places and parts must agree"
        place = first.clone()
        place[freed] = further
        first, second, scale = place, torch.where(place == first, second, place), scale[place]
        tensors = {"first": first.to(torch.int32), "second": second.to(torch.int32), "scale": scale}
        return cls(ReassemblyScheme(), shape, tensors)

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        total = x.index_select(-1, self.first).float() + x.index_select(-1, self.second)
        return (total * self.scale).to(x.dtype)

    def adapted(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """The weight for reassembled inputs: a sub-channel has the weight of its channel, a merged one the sum.

        The function is preserved but for merging: (w_i + w_j) (x_i + x_j) / 2 replaces w_i x_i + w_j x_j.
        """
        one = self.first == self.second
        return weight[:, self.first] + weight[:, self.second].masked_fill(one, 0)

    def absorbed(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        scaled = weight.float() * self.scale
        found = torch.zeros_like(scaled)
        for index in (self.first, self.second):
            found.index_add_(1, index, scaled)
        return found.to(weight.dtype)

    def validate(self, prefix: str) -> None:
        for index, name in ((self.first, "reassembly_first"), (self.second, "reassembly_second")):
            if not bool(((index >= 0) & (index < self.shape[1])).all()):
                raise ValueError(f"{stored_name(prefix, name)} holds a channel outside of the {self.shape[1]} inputs")
