"""The words shared by all floors: dtypes by name, and the notes that solvers leave."""

from __future__ import annotations

from collections.abc import Callable
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


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")
