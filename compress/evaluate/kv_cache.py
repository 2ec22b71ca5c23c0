"""What rounding the KV cache does: bytes of a token, relative errors of keys and values, and who knows of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from compress.api.context import Run
from compress.formats.base import CacheScheme
from compress.model.kv_cache import caching, rounded_caches, roundings, stated_scheme, watching
from compress.model.objective import without_cache
from compress.numerics.metrics import relative_error

LEFT = CacheScheme(None, None)
UNSTATED = (
    "Only compress.load knows of it: other programs read this checkpoint with keys and values as they are. vLLM rounds "
    "them to 8-bit floats with --kv-cache-dtype fp8, transformers to 2 or 4 bits with cache_implementation='quantized'."
)
STATED = "kv_cache_scheme in config.json says so to vLLM and to transformers (with compressed-tensors)."


def cache_report(model: PreTrainedModel, ids: Int[Tensor, "1 length"], run: Run) -> dict[str, Any] | None:
    """The section of report.json on a model as it was read back; None where no keys and values are rounded.

    bytes_per_token: of a cache that holds what is rounded in the bits of its grid, with its scales per token, and all
    else in the storage dtype. of: relative errors of the rounded keys and values of `ids`, by what they are.
    """
    rounded = rounded_caches(model)
    if not rounded:
        return None
    itemsize, before, after = run.storage.itemsize, 0.0, 0.0
    errors: dict[str, list[float]] = defaultdict(list)

    def see(name: str, *entering: Tensor) -> None:
        nonlocal before, after
        scheme, how = rounded.get(name, LEFT), roundings(model.get_submodule(name))
        for kind, x, grid, rounding in zip(("keys", "values"), entering, scheme.grids, how, strict=True):
            heads, width = x.shape[1], x.shape[-1]
            before += LEFT.token_bytes(None, heads, width, itemsize)
            after += scheme.token_bytes(grid, heads, width, itemsize)
            if grid is not None and rounding is not None:
                shared = "token and head" if scheme.scale == "token" else "attention"
                errors[f"{kind}, {grid.name} per {shared}"].append(relative_error(rounding(x), x))

    with watching(caching(model), see), torch.no_grad():
        model(input_ids=ids.to(next(model.parameters()).device), **without_cache(model))
    return {
        "bytes_per_token": {"before": before, "after": after},
        "stated": stated_scheme(model, rounded, run.format) is not None,
        "of": {kind: {"attentions": len(e), "mean_error": sum(e) / len(e), "largest_error": max(e)}
               for kind, e in errors.items()},
        "attentions": {name: scheme.to_json() for name, scheme in rounded.items()},
    }  # fmt: skip


def who_rounds(section: dict[str, Any]) -> str:
    """Who rounds, in words."""
    how = "Keys and values are rounded as they enter the cache, which is simulated: they stay in the model's dtype."
    return f"{how} {STATED if section['stated'] else UNSTATED}"
