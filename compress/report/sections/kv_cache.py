"""Section: rounding of the KV cache, its errors, and which programs apply it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.evaluate.kv_cache import KVCacheResult
from compress.report.page.blocks import Bars, Block, Prose, Table, before_and_after
from compress.report.page.numbers import data_size
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

HEAD = ("rounded", "attentions", "mean error", "largest")


class KVCache(Section):
    """A table of rounding errors by kind."""

    title: ClassVar[str] = "KV cache"
    order: ClassVar[int] = 60

    def render(self, report: Report) -> str | None:
        found: KVCacheResult | None = report.evaluations.get("kv_cache")
        if found is None:
            return None
        return f"{SIMULATED} {STATED if found.stated else UNSTATED}\n\n{table(HEAD, rows(found))}"

    def blocks(self, report: Report) -> Sequence[Block]:
        found: KVCacheResult | None = report.evaluations.get("kv_cache")
        if found is None:
            return []
        before, after = found.bytes_per_token.before, found.bytes_per_token.after
        names = (data_size(before), data_size(after))
        size = before_and_after("Cache of one token", f"{before / after:.2f}× smaller", (before, after), names)
        return [Bars([size]), Prose(f"{SIMULATED} {STATED if found.stated else UNSTATED}"), Table(HEAD, rows(found))]


def rows(found: KVCacheResult) -> list[tuple[str, str, str, str]]:
    """Rows of `HEAD`."""
    return [
        (kind, str(row.attentions), f"{row.mean_error:.4f}", f"{row.largest_error:.4f}")
        for kind, row in found.of.items()
    ]
