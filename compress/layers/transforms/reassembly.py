"""Reassembly of input channels: similar channels are merged, and large channels are split into the freed positions."""

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
    """Each output channel is a multiple of an input channel, or of the sum of two (Liu 2023, QLLM).

    The stored tensors are `reassembly_first` and `reassembly_second`, the input channels (equal for a single channel),
    and `reassembly_scale`, the factor of their sum.
    """

    kind: ClassVar[str] = "reassembly"
    effect: ClassVar[str] = "its input channels are split and merged when it runs"

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        index = TensorSpec((shape[1],), torch.int32)
        scale = TensorSpec((shape[1],), torch.float32)
        return {"reassembly_first": index, "reassembly_second": index, "reassembly_scale": scale}


class Reassembly(InputTransform):
    """(x[first] + x[second]) * scale, computed in float32 and returned in the dtype of x.

    Attributes:
        first: [in], first input channel.
        second: [in], second input channel; equal to `first` for a single channel.
        scale: [in], factor of the sum.
    """

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
    def of(cls, pairs: Int[Tensor, "n 2"], counts: Int[Tensor, " in"], shape: tuple[int, int]) -> Self:
        """Merge each pair of channels into its first channel, and split large channels into the freed positions.

        Args:
            pairs: channels to merge.
            counts: number of sub-channels of each channel, T_i of x_i / T_i. There are as many additional sub-channels
                as pairs.
            shape: (out, in) of the layer.
        """
        first_channels = torch.arange(shape[1])
        second_channels, scale = first_channels.clone(), 0.5 / counts.float()
        merged, freed_channels = pairs[:, 0], pairs[:, 1]
        second_channels[merged] = freed_channels
        split_channels = first_channels.repeat_interleave(counts - 1)
        assert len(split_channels) == len(freed_channels) and bool((counts[pairs.flatten()] == 1).all()), (
            "places and parts must agree"
        )
        channels = first_channels.clone()
        channels[freed_channels] = split_channels
        first_channels, second_channels, scale = (
            channels,
            torch.where(channels == first_channels, second_channels, channels),
            scale[channels],
        )
        tensors = {"first": first_channels.to(torch.int32), "second": second_channels.to(torch.int32), "scale": scale}
        return cls(ReassemblyScheme(), shape, tensors)

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch in"]:
        total = x.index_select(-1, self.first).float() + x.index_select(-1, self.second)
        return (total * self.scale).to(x.dtype)

    def adapted(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """Compute the weight for reassembled inputs.

        A sub-channel has the weight of its channel, and a merged channel the sum of two. The function is preserved
        except for the merging: (w_i + w_j) (x_i + x_j) / 2 replaces w_i x_i + w_j x_j.
        """
        is_single = self.first == self.second
        return weight[:, self.first] + weight[:, self.second].masked_fill(is_single, 0)

    def absorbed(self, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        scaled = weight.float() * self.scale
        folded = torch.zeros_like(scaled)
        for index in (self.first, self.second):
            folded.index_add_(1, index, scaled)
        return folded.to(weight.dtype)

    def validate(self, prefix: str) -> None:
        super().validate(prefix)
        for index, name in ((self.first, "reassembly_first"), (self.second, "reassembly_second")):
            if not bool(((index >= 0) & (index < self.shape[1])).all()):
                raise ValueError(f"{stored_name(prefix, name)} holds a channel outside of the {self.shape[1]} inputs")
