"""Whether Triton can compile programs for a device."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from compress.native.choice import chosen


@cache
def installed() -> bool:
    """Whether triton is installed and COMPRESS_KERNELS is not "none"."""
    return chosen() != "none" and importlib.util.find_spec("triton") is not None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability; (0, 0) for GPUs of other vendors; that of an H100 for the interpreter."""
    if device.type == "cpu":
        return 9, 0
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)
