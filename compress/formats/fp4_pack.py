"""What the two 4-bit float layouts of compressed-tensors have in common: two codes in a byte, and their refusals.

    <m>.weight_packed   uint8 [O, I/2]   two E2M1 codes per byte (sign * 8 + index into 0, .5, 1, 1.5, 2, 3, 4, 6), the
                                         even column in the low half

Of the reader (transformers 5.23 with compressed-tensors 0.20): it multiplies weights out in bfloat16 whatever the dtype
of the model, as one product in float32 that is rounded once. A model that is loaded in another dtype thus computes
with weights that are rounded to bfloat16; servers, which compute from the codes, do not.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from compress.formats.base import Scheme
from compress.numerics.grids import Grid


def refuses(scheme: Scheme, grid: Grid, shape: tuple[int, int]) -> str | None:
    """Why a layer cannot be held in groups of the grid, and what can be written instead."""
    size = grid.group_size
    assert size is not None
    if scheme.activations is not None:
        return f"{grid.name} weights are read with activations none only; leave activations out, or use format: native"
    if scheme.indexed:
        return f"act_order: group has no reader for {grid.name}; use act_order: static, or format: native"
    if shape[1] % size:
        return (
            f"{grid.name} has groups of {size} columns, which do not divide the {shape[1]} inputs; "
            "use another grid for this layer, or format: native"
        )
    return None


def as_bytes(words: Int[Tensor, "out words"]) -> Int[Tensor, "out bytes"]:
    """The dense bit stream of 4-bit codes as bytes; whole words, since groups are multiples of 8 columns."""
    return words.contiguous().view(torch.uint8)


def as_words(stream: Int[Tensor, "out bytes"]) -> Int[Tensor, "out words"]:
    """The inverse of as_bytes."""
    return stream.contiguous().view(torch.int32)


def weight_arguments(grid: Grid, strategy: str, scale_dtype: str) -> dict[str, Any]:
    """The `weights` part of a config group (QuantizationArgs)."""
    return {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": grid.group_size,
        "strategy": strategy,
        "dynamic": False,
        "scale_dtype": scale_dtype,
    }
