"""Floating-point dtypes by the names that recipes and configurations use."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return 'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")
