"""Size and error of a KV cache with a policy: bytes per token, and relative errors of keys and values."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.checkpoint.caches import stated_policy
from compress.evaluation.base import EvaluationContext, Evaluator
from compress.models.caches.attentions import attentions_with_cache, cache_policies, read_keys_and_values, watching
from compress.models.caches.base import CACHE_PARTS
from compress.models.forward import device_of_model
from compress.models.kinds.contract import run_on
from compress.numerics.metrics import relative_error


class KVCache(Evaluator):
    """Bytes per token and errors of the KV cache; None for a model without cache policies."""

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
