"""The words shared by all floors: dtypes by name, and the notes that solvers leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Fact = Literal["masked", "quantized", "activations_quantized", "cache_quantized"]
"""What can be true of a model after a pass; passes declare order by facts, never by each other's names."""

Note = Callable[..., None]
"""note(kind, message, **figures): how a solver reports a fallback without knowing the journal."""

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Extent:
    """How large the model, or the one block, is that a pass works on, in numbers.

    weights: of its linears that are dense when it comes. scales: of those that are packed. outside: parameters that
    are in no linear of the blocks. passed: inputs and outputs of all linears, per token. vocabulary: 0 of a block.
    length: tokens of an example: of a calibration sequence; of a block, of a batch of them. itemsize: bytes of a number
    of the dense model. packed: weights of the linears that are packed. inputs: widths of the tensors that the pass's
    linears read. largest: the most weights that one linear has. forward_bytes: of a block, what a forward pass of an
    example holds. states_bytes: of a block, its outputs on the whole calibration text.
    """

    weights: int
    scales: int
    outside: int
    passed: int
    vocabulary: int
    length: int
    itemsize: int
    packed: int = 0
    inputs: tuple[int, ...] = ()
    largest: int = 0
    forward_bytes: int = 0
    states_bytes: int = 0


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")
