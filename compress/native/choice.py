"""The environment variable that chooses kernels."""

from __future__ import annotations

import os

VARIABLE = "COMPRESS_KERNELS"
"""An instruction set to use on the CPU instead of the best one, or "none" for plain torch on every device."""


def chosen() -> str:
    """Return the value of the variable; empty: the best kernels."""
    return os.environ.get(VARIABLE, "")
