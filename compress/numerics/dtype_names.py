"""The names of floating-point dtypes in recipes and configurations."""

from __future__ import annotations

from compress.errors import did_you_mean

DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
"""Bits of a number by the name of its dtype in recipes."""

ALIASES = {"fp32": "float32", "f32": "float32", "float": "float32", "bf16": "bfloat16", "bfloat": "bfloat16"}
ALIASES |= dict.fromkeys(("fp16", "f16", "half", "16"), "float16") | {"32": "float32"}
"""Names of dtypes in other programs."""


def dtype_hint(name: str) -> str:
    """Return the dtype that a name is probably meant for, at the end of a message."""
    dtype = ALIASES.get(name.lower().removeprefix("torch."))
    return did_you_mean(name, ["auto", *DTYPE_BITS]) if dtype is None else f"; did you mean {dtype!r}?"
