"""Section: rounding of the KV cache, its errors, and which programs apply it."""

from __future__ import annotations

from typing import ClassVar

from compress.evaluate.kv_cache import KVCacheResult
from compress.report.schema import Report
from compress.report.sections.base import Section, table

SIMULATED = (
    "Keys and values are rounded as they enter the cache. The rounding is simulated: they stay in the model's dtype."
)
UNSTATED = (
    "Only compress.load applies it: other programs read this checkpoint without rounding keys and values. vLLM rounds "
    "them to 8-bit floats with --kv-cache-dtype fp8, transformers to 2 or 4 bits with cache_implementation='quantized'."
)
STATED = "kv_cache_scheme in config.json tells vLLM and transformers (with compressed-tensors) to apply it."


class KVCache(Section):
    """A table of rounding errors by kind."""

    title: ClassVar[str] = "KV cache"
    order: ClassVar[int] = 60

    def render(self, report: Report) -> str | None:
        found: KVCacheResult | None = report.evaluations.get("kv_cache")
        if found is None:
            return None
        rows = [
            (kind, str(row.attentions), f"{row.mean_error:.4f}", f"{row.largest_error:.4f}")
            for kind, row in found.of.items()
        ]
        errors = table(("rounded", "attentions", "mean error", "largest"), rows)
        return f"{SIMULATED} {STATED if found.stated else UNSTATED}\n\n{errors}"
