"""The dtype in which a model is computed."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from compress.errors import ModelError, did_you_mean
from compress.numerics.dtypes import DTYPES, dtype_name, fast_dtype


def compute_dtype(
    config: PretrainedConfig, dtype: str, device: torch.device
) -> tuple[torch.dtype, torch.dtype | None]:  # fmt: skip
    """The dtype of computation, and that of the checkpoint if 'auto' chooses a wider one for the computation.

    dtype: a name, or 'auto': that of the configuration, float32 when it has none, and float32 instead of bfloat16 on a
    processor that computes bfloat16 slowly (`fast_dtype`). Raises ModelError.
    """
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ModelError(f"dtype {dtype!r} is not known{did_you_mean(dtype, ['auto', *DTYPES])}")
        return DTYPES[dtype], None
    named = getattr(config, "dtype", None)
    if isinstance(named, torch.dtype) and named not in DTYPES.values():
        known = ", ".join(DTYPES)
        raise ModelError(
            f"model: config.json states the dtype {dtype_name(named)}; choose a dtype of computation: {known}"
        )
    found = named if isinstance(named, torch.dtype) else torch.float32
    fast = fast_dtype(found, device)
    return fast, None if fast == found else found


def widened(stored: torch.dtype | None) -> list[str]:
    """A note about a computation in float32 where the checkpoint is in `stored`; none if that is None."""
    if stored is None:
        return []
    name = dtype_name(stored)
    return [
        f"this processor has no instructions for {name} products, so the computation is in float32, block by block; "
        f"the weights stay mapped and are stored in {name} (dtype: {name} computes in it)"
    ]
