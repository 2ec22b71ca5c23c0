"""The common base of the two 4-bit float layouts of compressed-tensors: two codes per byte.

<m>.weight_packed   uint8 [O, I/2]   two E2M1 codes per byte (sign * 8 + index into 0, .5, 1, 1.5, 2, 3, 4, 6), the
                                     even column in the low half
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from compress.checkpoint.formats.accepted import only
from compress.checkpoint.formats.layouts.block_floats import BlockFloats
from compress.checkpoint.formats.layouts.layout import FLOATS
from compress.layers.base import TensorSpec
from compress.layers.scheme import LayerScheme


def as_bytes(words: Int[Tensor, "out words"]) -> Int[Tensor, "out bytes"]:
    """View words of 4-bit codes as bytes; words are whole, because groups are multiples of 8 columns."""
    return words.contiguous().view(torch.uint8)


def as_words(stream: Int[Tensor, "out bytes"]) -> Int[Tensor, "out words"]:
    """The inverse of as_bytes."""
    return stream.contiguous().view(torch.int32)


class Float4Layout(BlockFloats):
    """A layout of 4-bit floats."""

    states = FLOATS | {"num_bits": only(4)}

    def tensors(self, scheme: LayerScheme) -> dict[str, TensorSpec]:
        rows, width = scheme.shape
        return {"weight_packed": TensorSpec((rows, width // 2), torch.uint8), "weight_scale": self.scales(scheme)}
