"""Size and error of a quantized KV cache: bytes per token, and relative errors of keys and values."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.checkpoint.save import stated_scheme
from compress.evaluate.base import EvaluationContext, Evaluator, Record, SummaryRow
from compress.models.caches.quantized import attentions_with_cache, rounded_caches, roundings, watching
from compress.models.caches.scheme import CacheScheme
from compress.models.kinds.contract import run_on
from compress.numerics.metrics import relative_error

UNROUNDED = CacheScheme(None, None)


class BytesPerToken(Record):
    """Bytes of one token's keys and values over all attentions, before and after rounding.

    Rounded keys and values count with the bits of their grid and their scales per token, others in the storage dtype.
    """

    before: float
    after: float


class RoundingError(Record):
    """Relative error of the keys, or the values, of attentions that are rounded in the same way."""

    attentions: int
    mean_error: float
    largest_error: float


class KVCacheResult(Record):
    """The result of the evaluator.

    Attributes:
        bytes_per_token: Before and after.
        stated: Whether config.json tells other programs to round.
        of: Errors on the probe, by kind (keys or values), grid and sharing of scales.
        attentions: The `CacheScheme` of each attention, as JSON.
    """

    bytes_per_token: BytesPerToken
    stated: bool
    of: dict[str, RoundingError]
    attentions: dict[str, dict[str, Any]]


class KVCache(Evaluator):
    """Bytes per token and rounding errors of the KV cache; None for a model that does not round it."""

    result_type: ClassVar[Any] = KVCacheResult

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any] | None:
        rounded = rounded_caches(model)
        if not rounded or context.probe is None:
            return None
        itemsize, bytes_before, bytes_after = context.run.storage.itemsize, 0.0, 0.0
        errors: dict[str, list[float]] = defaultdict(list)

        def see(name: str, *entering: Tensor) -> None:
            nonlocal bytes_before, bytes_after
            scheme, how = rounded.get(name, UNROUNDED), roundings(model.get_submodule(name))
            kinds = zip(("keys", "values"), scheme.grids, scheme.groups, scheme.transformed, strict=True)
            for (kind, grid, group, transformed), x, rounding in zip(kinds, entering, how, strict=True):
                heads, width = x.shape[1], x.shape[-1]
                bytes_before += UNROUNDED.token_bytes(None, heads, width, itemsize)
                bytes_after += scheme.token_bytes(grid, heads, width, itemsize, group)
                if grid is not None and rounding is not None:
                    shared = "token and head" if scheme.scale == "token" else "attention"
                    shared = shared if group is None else f"channel and {group} tokens"
                    shared += ", Hadamard" if transformed else ""
                    errors[f"{kind}, {grid.name} per {shared}"].append(relative_error(rounding(x), x))

        with watching(attentions_with_cache(model), see), torch.no_grad():
            run_on(model, context.probe.to(next(model.parameters()).device))
        return {
            "bytes_per_token": {"before": bytes_before, "after": bytes_after},
            "stated": stated_scheme(model, rounded, context.run.format) is not None,
            "of": {
                kind: {"attentions": len(e), "mean_error": sum(e) / len(e), "largest_error": max(e)}
                for kind, e in errors.items()
            },
            "attentions": {name: scheme.to_json() for name, scheme in rounded.items()},
        }

    def summary(self, result: KVCacheResult) -> list[SummaryRow]:
        bytes_before, bytes_after = result.bytes_per_token.before, result.bytes_per_token.after
        return [
            (
                "KV cache, bytes per token",
                f"{bytes_before:g}",
                f"{bytes_after:g}",
                f"{bytes_before / bytes_after:.2f}x smaller",
            )
        ]
