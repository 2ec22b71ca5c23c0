"""The words shared by all floors: dtypes by name, and the notes that solvers leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Fact = Literal["masked", "quantized", "activations_quantized"]
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
    """How large the model is that a pass over all of it works on, in numbers.

    weights: of its linears that are dense when it comes. scales: of those that are packed. outside: parameters that
    are in no linear of the blocks. passed: inputs and outputs of all linears, per token. vocabulary. length: of a
    calibration sequence. itemsize: bytes of a number of the dense model.
    """

    weights: int
    scales: int
    outside: int
    passed: int
    vocabulary: int
    length: int
    itemsize: int


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")
