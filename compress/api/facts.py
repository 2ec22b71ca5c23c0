"""Facts: what can be true of a layer after a pass; and the log function that a solver is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Fact = Literal["masked", "quantized", "activations_quantized", "cache_quantized"]
"""What can be true of a model after a pass; passes declare order by facts, never by each other's names."""

Log = Callable[..., None]
"""log(kind, message, **figures): how a solver writes to the journal without knowing it."""
