"""Section: policies of the KV cache, their errors, and which programs apply them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.report.page.blocks import Bars, PageBlock, Prose, TextTable, before_and_after
from compress.report.page.numbers import data_size
from compress.report.sections.base import Section, table
from compress.results.measurements.kv_cache import KVCacheResult
from compress.results.result import RunResult

UNSTATED = (
    "Only compress.load applies it: other programs read this checkpoint with an exact KV cache. vLLM quantizes it "
    "to 8-bit floats with --kv-cache-dtype fp8, transformers to 2 or 4 bits with cache_implementation='quantized'."
)
STATED = "kv_cache_scheme in config.json tells vLLM and transformers (with compressed-tensors) to apply it."

HEAD = ("policy", "attentions", "mean error", "largest")


class KVCacheSection(Section):
    """A table of errors of keys and values."""

    title: ClassVar[str] = "KV cache"
    order: ClassVar[int] = 60

    def render(self, result: RunResult) -> str | None:
        cache: KVCacheResult | None = result.evaluations.get("kv_cache")
        return None if cache is None else f"{_text(cache)}\n\n{table(HEAD, rows(cache))}"

    def blocks(self, result: RunResult) -> Sequence[PageBlock]:
        cache: KVCacheResult | None = result.evaluations.get("kv_cache")
        if cache is None:
            return []
        sizes = cache.bytes_per_token.before, cache.bytes_per_token.after
        names = data_size(sizes[0]), data_size(sizes[1])
        label = f"{sizes[0] / sizes[1]:.2f}× smaller" + (", simulated" if cache.simulated else "")
        bars = before_and_after("Cache of one token", label, sizes, names)
        return [Bars([bars]), Prose(_text(cache)), TextTable(HEAD, rows(cache))]


def _text(cache: KVCacheResult) -> str:
    return " ".join((*cache.summaries, STATED if cache.stated else UNSTATED))


def rows(cache: KVCacheResult) -> list[tuple[str, str, str, str]]:
    """List rows of `HEAD`."""
    return [
        (kind, str(row.attentions), f"{row.mean_error:.4f}", f"{row.largest_error:.4f}")
        for kind, row in cache.of.items()
    ]
