"""The common base of the two 4-bit float layouts of compressed-tensors: two codes per byte.

    <m>.weight_packed   uint8 [O, I/2]   two E2M1 codes per byte (sign * 8 + index into 0, .5, 1, 1.5, 2, 3, 4, 6), the
                                         even column in the low half

The reader (transformers 5.23 with compressed-tensors 0.20) dequantizes weights in bfloat16 for every dtype of the
model: it computes one product in float32 and rounds it once. A model that is loaded in another dtype therefore computes
with weights that are rounded to bfloat16. Servers compute from the codes and do not round them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from compress.checkpoint.formats.accepted import only
from compress.checkpoint.formats.layouts.layout import FLOATS, Layout, codes_of
from compress.layers.base import TensorSpec
from compress.layers.scheme import LayerScheme


def as_bytes(words: Int[Tensor, "out words"]) -> Int[Tensor, "out bytes"]:
    """View words of 4-bit codes as bytes; words are whole, because groups are multiples of 8 columns."""
    return words.contiguous().view(torch.uint8)


def as_words(stream: Int[Tensor, "out bytes"]) -> Int[Tensor, "out words"]:
    """The inverse of as_bytes."""
    return stream.contiguous().view(torch.int32)


class Float4Layout(Layout):
    """A layout of 4-bit floats. strategy, scale_dtype: as in the config."""

    strategy: ClassVar[str]
    states = FLOATS | {"num_bits": only(4)}
    scale_dtype: ClassVar[str]

    def refuses(self, scheme: LayerScheme) -> str | None:
        codes, width = codes_of(scheme), scheme.shape[1]
        name, size = codes.grid.name, codes.grid.group_size
        assert size is not None
        if scheme.rounding is not None:
            return f"{name} weights are read only with activations: none; leave activations out, or use format: native"
        if codes.indexed:
            return f"act_order: group has no reader for {name}; use act_order: static, or format: native"
        if width % size:
            return (
                f"{name} has groups of {size} columns, which do not divide the {width} inputs; "
                "use another grid for this layer, or format: native"
            )
        return None

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        (rows, width), size = scheme.shape, codes_of(scheme).grid.group_size
        assert size is not None
        scales = TensorSpec((rows, width // size), getattr(torch, self.scale_dtype.removeprefix("torch.")))
        return {"weight_packed": TensorSpec((rows, width // 2), torch.uint8), "weight_scale": scales}

    def weight_arguments(self, scheme: LayerScheme) -> dict[str, Any]:
        return super().weight_arguments(scheme) | {"strategy": self.strategy, "scale_dtype": self.scale_dtype}
