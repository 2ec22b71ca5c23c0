"""Facts about a layer after a pass, and the type of the log function that a solver receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Fact = Literal["masked", "quantized", "activations_quantized", "cache_quantized"]
"""A property of a model after a pass; passes declare their order by facts, never by names of other passes."""

Log = Callable[..., None]
"""log(kind, message, **figures): writes to the journal."""
