"""Size and error of a KV cache with a policy: bytes per token, and relative errors of keys and values."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.checkpoint.caches import stated_policy
from compress.evaluation.base import EvaluationContext, Evaluator, Record, SummaryRow
from compress.models.caches.attentions import attentions_with_cache, cache_policies, read_keys_and_values, watching
from compress.models.caches.base import CACHE_PARTS
from compress.models.forward import device_of_model
from compress.models.kinds.contract import run_on
from compress.numerics.metrics import relative_error


class BytesPerToken(Record):
    """Bytes of one token's keys and values over all attention modules, without and with their cache policies.

    Exact keys and values count in the storage dtype.
    """

    before: float
    after: float


class CacheError(Record):
    """Relative error of the keys, or the values, of attention modules that store them in the same way."""

    attentions: int
    mean_error: float
    largest_error: float


class KVCacheResult(Record):
    """The result of the evaluator.

    Attributes:
        bytes_per_token: Without and with the policies.
        simulated: Whether these bytes are those of a program that stores the cache packed: here, it stays in floats.
        stated: Whether config.json tells other programs to apply the policy.
        of: Errors on the probe, by keys or values and the text of the policy.
        attentions: The policy of each attention module, as JSON.
        summaries: Sentences about the policies.
    """

    bytes_per_token: BytesPerToken
    simulated: bool
    stated: bool
    of: dict[str, CacheError]
    attentions: dict[str, dict[str, Any]]
    summaries: tuple[str, ...] = ()


class KVCache(Evaluator):
    """Bytes per token and errors of the KV cache; None for a model without cache policies."""

    result_type: ClassVar[Any] = KVCacheResult

    def measure(self, model: PreTrainedModel, context: EvaluationContext) -> dict[str, Any] | None:
        policies = cache_policies(model)
        if not policies or context.probe is None:
            return None
        itemsize, bytes_before, bytes_after = context.run.storage.itemsize, 0.0, 0.0
        errors: dict[str, list[float]] = defaultdict(list)

        def see(name: str, *keys_and_values: Tensor) -> None:
            nonlocal bytes_before, bytes_after
            policy = policies.get(name)
            approximations = read_keys_and_values(model.get_submodule(name), *keys_and_values)
            for part, x, approximation in zip(CACHE_PARTS, keys_and_values, approximations, strict=True):
                heads, width = x.shape[1], x.shape[-1]
                exact_bytes = heads * width * itemsize
                bytes_before += exact_bytes
                bytes_after += exact_bytes if policy is None else policy.token_bytes(part, heads, width, itemsize)
                if policy is not None and (text := policy.text_of(part)) is not None:
                    errors[f"{part}, {text}"].append(relative_error(approximation, x))

        with watching(attentions_with_cache(model), see), torch.no_grad():
            run_on(model, context.probe.to(device_of_model(model)))
        return {
            "bytes_per_token": {"before": bytes_before, "after": bytes_after},
            "simulated": any(policy.simulated for policy in policies.values()),
            "stated": stated_policy(model, policies, context.run.format) is not None,
            "of": {
                text: {"attentions": len(e), "mean_error": sum(e) / len(e), "largest_error": max(e)}
                for text, e in errors.items()
            },
            "attentions": {name: policy.to_json() for name, policy in policies.items()},
            "summaries": sorted({policy.summary for policy in policies.values()}),
        }

    def summary(self, result: KVCacheResult) -> list[SummaryRow]:
        bytes_before, bytes_after = result.bytes_per_token.before, result.bytes_per_token.after
        ratio = f"{bytes_before / bytes_after:.2f}x smaller" + (", simulated" if result.simulated else "")
        return [("KV cache, bytes per token", f"{bytes_before:g}", f"{bytes_after:g}", ratio)]
